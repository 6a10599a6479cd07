"""The joint graph of forward and backward, and its partition into step graphs.

    joint(primals, tangents) -> outputs, gradients

`Joint` traces it. `Joint.forward` is the graph of the outputs and of the saved values. `Joint.graph_of` is the graph of
any other nodes, given the known values: inputs, saved values, tangents. Values that depend on parameters alone, and
views, are never saved but recomputed right before their first use, so that gathered ZeRO weights are freed in between.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.ac_policies import StageCheckpoints
from autopar.adapters.fx.graph_nodes import copied_node
from autopar.adapters.fx.lazy import graph_module
from autopar.ir.graph import (
    add_placeholder,
    ancestors,
    copy_node,
    frozen,
    insert_call,
    is_call,
    output_node,
    outputs,
    placeholders,
    reach,
    values,
)
from autopar.ir.meta import ORIGIN, inherit
from autopar.ir.storages import is_dense
from autopar.ops.traits import aliases, is_cheap, is_random, is_view
from autopar.passes.autodiff.clone_aliased_grads import clone_aliased_grads
from autopar.passes.autodiff.fused_loss_backward import fuse_loss_backward
from autopar.passes.autodiff.routed_sizes import most_rows, routed_sizes
from autopar.passes.autodiff.share_scales import share_scales
from autopar.passes.autodiff.trace_joint import joint_graph
from autopar.passes.autodiff.widen_reductions import widen_reductions
from autopar.steps.graphs import StepGraph, is_a

ours = torch.ops.autopar


class Joint:
    """A traced joint graph.

    primals: placeholder -> its name in the local graph. tangents: one per output with a gradient, in order. outs: the
    outputs of the local graph. gradients: name of a placeholder that wants one -> its gradient (None: it has none).
    wanted: the values of the forward that the backward uses. recomputed: values, of these and their ancestors, that it
    recomputes; always: those of them that no policy decides about. early: gradients that F computes. offloaded: values
    saved by F that are offloaded to host memory.
    """

    def __init__(
        self,
        gm: GraphModule,
        wanted: Sequence[bool],
        fixed: Iterable[str],
        sums: Mapping[str, torch.dtype],
        early: bool = False,
    ) -> None:
        """``wanted``: per placeholder, whether it wants a gradient. ``fixed``: names of parameters, buffers, constants.
        ``sums``: placeholder -> the dtype in which its gradient is reduced over ranks. ``early``: whether F computes
        the gradients of chunked losses where it can."""
        names = [n.name for n in placeholders(gm)]
        self.gm = joint = joint_graph(gm, wanted)
        nodes, count = placeholders(joint), len(outputs(gm))
        if any(wanted):
            widen_reductions(joint, [None] * count + [sums.get(name) for name in names])
        self.names = names
        self.primals = dict(zip(nodes, names, strict=False))
        self.tangents = nodes[len(names) :]
        sum_products(joint, self.tangents)
        shared_counts(joint)
        share_scales(joint)
        routed_sizes(joint)
        most_rows(joint)
        if early:
            fuse_loss_backward(joint, self.tangents)
        results = list(output_node(joint).args[0])  # type: ignore[arg-type]
        self.outs: list[Node | None] = results[:count]
        self.gradients = {n: g for n, g, w in zip(names, results[count:], wanted, strict=False) if w}
        self.order = {n: i for i, n in enumerate(joint.graph.nodes)}
        self.early = {n for n in joint.graph.nodes if "early" in n.meta}
        self.made = ancestors([*(n for n in self.outs if isinstance(n, Node)), *self.early])
        kept = set(fixed)
        self.parameter_only = self._parameter_only({p for p, name in self.primals.items() if name in kept})
        grads = [g for g in self.gradients.values() if g is not None]
        self.dependent = self._dependent(ancestors(grads))
        self.always = frozenset(n for n in self.made if n.op == "call_function" and in_pieces(n))
        self.recomputed = self.always
        self.offloaded = frozenset[Node]()
        self._taken = [x for node in self.dependent for x in node.all_input_nodes] + grads
        self.wanted = self.sources(self._taken)

    @property
    def saved(self) -> list[Node]:
        """The values that F saves for the backward, in order."""
        return sorted(self.closure(self.wanted, self.recomputed)[0], key=self.order.__getitem__)

    def _dependent(self, needed: set[Node]) -> dict[Node, None]:
        """The nodes that depend on a tangent, in order."""
        found: dict[Node, None] = dict.fromkeys(self.tangents)
        for node in self.order:
            if node in needed and any(x in found for x in node.all_input_nodes):
                found[node] = None
        return found

    def _parameter_only(self, weights: set[Node]) -> set[Node]:
        """Parameters, and values that depend on parameters alone."""
        found = set(weights)
        for node in self.order:
            inputs = node.all_input_nodes
            if node.op == "call_function" and inputs and all(x in found for x in inputs):
                found.add(node)
        return found

    def sources(self, nodes: Iterable[Node]) -> list[Node]:
        """What must be saved or recomputed to compute ``nodes``; looks through given values and those that are free to
        recompute."""
        found: dict[Node, None] = {}
        seen: set[Node] = set()
        queue = list(nodes)
        while queue:
            x = queue.pop()
            if x in seen or x in self.dependent or x in self.primals:
                continue
            seen.add(x)
            if self.is_free(x):
                queue += x.all_input_nodes
            else:
                found[x] = None
        return list(found)

    def keep(self, checkpoints: StageCheckpoints) -> None:
        """Set what the backward recomputes and what is offloaded to host memory. Raises ValueError for names that the
        graph does not have, and for values that cannot be offloaded."""
        self.recomputed = self._named(checkpoints.again) | self.always
        self.offloaded = self._named(checkpoints.host) & set(self.saved)
        for node in self.offloaded:
            if not self.can_offload(node):
                raise ValueError(
                    f"activation_checkpoint: a plan offloads {node.name} to host memory, which is an output of the "
                    "model or not dense; leave its checkpoints out, or make a new plan"
                )

    def _named(self, names: Collection[str]) -> frozenset[Node]:
        named = frozenset(n for n in self.order if n.name in names) if names else frozenset[Node]()
        unknown = set(names) - {n.name for n in named}
        if unknown:
            raise ValueError(
                f"activation_checkpoint: a plan names {', '.join(sorted(unknown)[:3])}, which the graph does not have; "
                "it was made for another model, batch or version: leave its checkpoints out, or make a new plan"
            )
        return named

    def can_offload(self, x: Node) -> bool:
        """Whether offloading frees its bytes once F has used it: it is not returned from the model, and it fills its
        storage alone."""
        val = x.meta["val"]
        if not isinstance(val, torch.Tensor) or not val.numel() or x in self._leaving:
            return False
        return is_dense(val)

    @cached_property
    def _leaving(self) -> set[Node]:
        """The outputs, and what they are views of."""
        made = [n for n in self.outs if isinstance(n, Node)]
        return set(reach(made, lambda x: x.all_input_nodes if aliases(x.target) or part_of_view(x) else ()))

    def closure(self, wanted: Iterable[Node], recomputed: Collection[Node]) -> tuple[list[Node], list[Node]]:
        """(saved, recomputed) such that ``wanted`` can be computed if the values in ``recomputed`` are recomputed."""
        kept: dict[Node, None] = {}
        again: dict[Node, None] = {}
        queue = list(wanted)
        while queue:
            x = queue.pop()
            if x in kept or x in again:
                continue
            if x in recomputed or not isinstance(x.meta["val"], torch.Tensor):  # tuples are not saved
                again[x] = None
                queue += self.sources(x.all_input_nodes)
            else:
                kept[x] = None
        return list(kept), list(again)

    def is_free(self, x: Node) -> bool:
        """Whether it is recomputed in any case: a view, a value of parameters alone, a value of the backward only."""
        cheap = is_cheap(x.target) or part_of_view(x) or not x.all_input_nodes
        return cheap or x in self.parameter_only or not self._made_by_forward(x)

    def _made_by_forward(self, x: Node) -> bool:
        """Whether F computes it, or the tuple that it is an entry of: then the entry is saved, never the tuple."""
        return x in self.made or (is_call(x, operator.getitem) and x.args[0] in self.made)

    # --- graphs -------------------------------------------------------------------------------------------

    def forward(self, keep: Iterable[str] | None = None) -> GraphModule:
        """Returns the outputs, then the saved values. Takes every primal, or those in ``keep`` and those it uses:
        ``meta["takes"]`` has their names, since a graph renames inputs that are named like a Python builtin
        (``input``)."""
        results = [*self.outs, *self.saved]
        needed = ancestors([n for n in results if isinstance(n, Node)])
        graph, copies, hosts = Graph(), dict[Node, Node](), dict[Node, Node]()
        for node, name in self.primals.items():
            if keep is None or name in keep or node in needed:
                copies[node] = add_placeholder(graph, name, like=node)
        for node in self.order:
            if node.op == "call_function" and node in needed:
                copies[node] = copied_node(graph, node, copies.__getitem__)
                if node in self.offloaded:
                    hosts[node] = _copy_between(graph, ours.to_host.default, copies[node])
        kept = [n for n in self.saved if n not in hosts]
        for node in kept if self.recomputed or hosts else ():
            copies[node].meta["kept"] = True
        made = [copies[n] if isinstance(n, Node) else n for n in self.outs]
        graph.output((*made, *(hosts.get(n, copies[n]) for n in self.saved)))
        gm = graph_module(graph, "Forward")
        gm.meta["takes"] = [name for node, name in self.primals.items() if node in copies]
        return gm

    def graph_of(
        self, run: Iterable[Node], results: Sequence[tuple[str, Node | None]], known: Mapping[Node, str], title: str
    ) -> StepGraph:
        """Runs ``run`` (in order) and recomputes what that needs; returns ``results`` by name.

        ``known``: given nodes, with their names in the environment; those that are used become inputs. Each recomputed
        node is copied right before its first use. Every result has a storage of its own, except those named
        ``stash:...``, which are never written to.
        """
        run = list(run)
        needed = self._given([*run, *(n for _, n in results if n is not None)], known)
        graph, copies = Graph(), dict[Node, Node]()
        given = [n for n in known if n in needed]
        for node in given:
            copies[node] = add_placeholder(graph, self.primals.get(node, node.name), like=node)
        back = {n: _copy_between(graph, ours.from_host.default, copies[n]) for n in given if n in self.offloaded}
        copies |= back
        for node in run:
            copy_node(graph, node, copies)
        place = {node: i for i, node in enumerate(graph.nodes)}
        for node in back.values():
            min(node.users, key=place.__getitem__).prepend(node)
        graph.output(tuple(copy_node(graph, n, copies) if n is not None else None for _, n in results))
        gm = graph_module(graph, title)
        for node in self.recomputed & copies.keys() - known.keys():
            copies[node].meta["again"] = True
        gm.meta["owned"] = [i for i, (name, _) in enumerate(results) if not is_a(name, "stash")]
        clone_aliased_grads(gm)
        return StepGraph(gm, [known[n] for n in given], [name if n is not None else None for name, n in results])

    def _given(self, wanted: Iterable[Node], known: Mapping[Node, str]) -> set[Node]:
        """The known nodes that the wanted ones depend on with no other known node in between."""
        return {x for x in reach(wanted, lambda x: () if x in known else x.all_input_nodes) if x in known}


def _copy_between(graph: Graph, target: Any, x: Node) -> Node:
    """A copy to or from the host that keeps the origin of its operand."""
    node = graph.call_function(target, (x,))
    inherit(node, x, ORIGIN)
    node.meta["val"] = x.meta["val"]
    return node


def in_pieces(node: Node) -> bool:
    """Whether it is computed chunk by chunk of a loss, or tile by tile of a region, so that it is never saved."""
    return "chunk" in node.meta or "tile" in node.meta


def part_of_view(node: Node) -> bool:
    """Whether it is a getitem of a split, which is a view as well."""
    return is_call(node, operator.getitem) and isinstance(node.args[0], Node) and is_view(node.args[0].target)


aten = torch.ops.aten


def sum_products(gm: GraphModule, tangents: Iterable[Node]) -> None:
    """Fuse a product that is only added to an earlier sum without other users into one call, which overwrites the sum
    (`autopar.ir.waits`): one buffer instead of three for the old sum, the product and the new sum.

        g1 = mm(a, b); g2 = mm(c, d); g = add(g1, g2)    -->    g1 = mm(a, b); g = addmm(g1, c, d)

    Weights are used several times where they are tied, and where losses are computed in chunks of tokens. Values of the
    forward are left alone: a policy decides whether they are recomputed, and gradients are bitwise equal under each.
    """
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    gradients = set(tangents)
    for node in list(gm.graph.nodes):
        if gradients.isdisjoint(node.all_input_nodes) or node.op == "output":
            continue
        gradients.add(node)
        if not is_call(node, aten.add.Tensor) or node.kwargs or len(node.all_input_nodes) < 2:
            continue
        for x in [x for x in node.all_input_nodes if x in gradients]:
            _straighten(x)
        first, last = sorted(node.all_input_nodes, key=order.__getitem__)
        if is_call(last, aten.mm.default) and last in gradients and _only(first, node) and _only(last, node):
            total = insert_call(last, aten.addmm.default, (first, *last.args), like=last, val=last.meta["val"])
            order[total] = order[last]
            gradients.add(total)
            node.replace_all_uses_with(total)
            gm.graph.erase_node(node)
            gm.graph.erase_node(last)
    gm.recompile()


def _straighten(x: Node) -> None:
    """Drop the double transpose of the gradient of a weight that is used transposed."""
    once = x.args[0] if is_call(x, aten.t.default) else None
    if isinstance(once, Node) and is_call(once, aten.t.default) and len(x.users) == len(once.users) == 1:
        x.replace_all_uses_with(once.args[0])  # type: ignore[arg-type]
        x.graph.erase_node(x)
        x.graph.erase_node(once)


def _only(x: Node, user: Node) -> bool:
    """Whether ``user`` is the only user of x, and takes it unchanged."""
    given, made = x.meta["val"], user.meta["val"]
    return list(x.users) == [user] and given.shape == made.shape and given.dtype == made.dtype


def shared_counts(gm: GraphModule) -> None:
    """Merge the calls that count the copies of tokens per rank and per expert where they ask about the same choice of
    experts: the dispatch and the combine of a layer both ask.

        a = moe_copies(e); c = all_to_all(a1); s = row_splits(a1, c)
        b = moe_copies(e); d = all_to_all(b1); t = row_splits(b1, d)    -->    (a, c and s, for all users)
    """
    counts = ancestors([node for node in gm.graph.nodes if is_call(node, ours.row_splits.default)])
    seen: dict[Any, Node] = {}
    for node in list(gm.graph.nodes):
        asked = node in counts or (is_call(node, operator.getitem) and node.args[0] in counts)
        if asked and _is_whole_numbers(node):
            first = seen.setdefault((node.target, *(frozen(x, lambda x: x) for x in (node.args, node.kwargs))), node)
            if first is not node:
                node.replace_all_uses_with(first)
                gm.graph.erase_node(node)


def _is_whole_numbers(node: Node) -> bool:
    """Whether a call returns integers, and the same ones each time."""
    if node.op != "call_function" or is_random(node.target):
        return False
    return all(not x.is_floating_point() and not x.is_complex() for x in values(node))

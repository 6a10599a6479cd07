"""differentiate: from a local graph to its step graphs, forward (F) and backward (B), without autograd at run time.

Consumes    a local graph of the whole model or of a pipeline stage.
Guarantees  F returns the outputs and what the backward needs; BW takes that, parameters and tangents, and returns the
            gradients. F saves no views (it saves their base), no tuples, and nothing that depends on parameters alone:
            the backward recomputes these, and whatever the activation checkpointing policy adds. For schedules that
            split the backward there are also B and W: B computes what leads to the gradient of a received value, or to
            the gradients of two or more parameters (else B of the first stage would be empty); W computes the rest.
            What both need recomputed, B recomputes.
Leaves      the operators: they are torch's.

    F:  y = mm(x, t(gather(w)))         -->    saves x
    B:  dx = mm(dy, gather(w))                 gathers w again;  stashes dy
    W:  dw = mm(t(dy), x)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.ac_policies import NOTHING, StageCheckpoints
from autopar.ir.conversions import is_conversion
from autopar.ir.graph import ancestors, has_gradient, insert_call, output_node, outputs, placeholders
from autopar.ir.meta import TYPES, inherit
from autopar.ir.placement import conversion, parse_placement
from autopar.ops.traits import PRODUCTS, aliases
from autopar.passes.autodiff.backward_builder import forward_calls
from autopar.passes.autodiff.joint import Joint, part_of_view
from autopar.steps.graphs import Stage, StepGraph, grad, is_a, of, on_host, saved, stash

aten = torch.ops.aten


class Differentiated:
    """The model or a stage of it with its derivative, as one graph (``joint``), from which step graphs are made."""

    def __init__(
        self,
        gm: GraphModule,
        results: Mapping[str, str],
        fixed: Iterable[str],
        sums: Mapping[str, torch.dtype] | None = None,
        early: bool = False,
    ) -> None:
        """results: name of each output, in order -> its kind: "loss", "sent", "mutation" or "output". fixed: names of
        the placeholders that are parameters, buffers or constants. Every placeholder that can have a gradient gets
        one; gradients start from losses and from what is sent. sums, early: see `Joint`."""
        self.results, self.fixed = results, set(fixed)
        self.names, values = list(results), outputs(gm)
        self.live = [i for i, v in enumerate(values) if isinstance(v, Node) and has_gradient(v)]
        self.active = [i for i in self.live if results[self.names[i]] in ("loss", "sent")]
        own_outputs(gm, self.active)
        self.calls = forward_calls(gm)
        self.joint = _joint(gm, self.active, self.fixed, sums or {}, early)

    def stage(self, split: bool = False, checkpoints: StageCheckpoints = NOTHING) -> Stage:
        """split: build B and W as well. checkpoints: which values of the joint graph are recomputed or offloaded."""
        joint, names = self.joint, self.names
        joint.keep(checkpoints)
        graph = joint.forward(keep=())
        kept = {n: on_host(n.name) if n in joint.offloaded else saved(n.name) for n in joint.saved}
        forward = StepGraph(graph, graph.meta["takes"], [*names, *kept.values()])
        stage = Stage(forward, losses=[n for n, kind in self.results.items() if kind == "loss"])
        stage.dependent = [
            names[i] for i in self.live if is_a(names[i], "output") and self.results[names[i]] != "mutation"
        ]
        if not joint.gradients:
            return stage
        known = {**joint.primals, **kept}
        known |= {tangent: grad(names[i]) for i, tangent in zip(self.active, joint.tangents, strict=True)}
        grads = {grad(name): g for name, g in joint.gradients.items()}
        stage.roots = _roots(joint, [names[i] for i in self.active], grads)
        stage.backward = joint.graph_of(joint.dependent, list(grads.items()), known, "Backward")
        if split:
            stage.backward_input, stage.backward_weight = _split_backward(joint, grads, known, self.fixed, self.first)
        return stage

    @cached_property
    def first(self) -> set[Node]:
        """The nodes of the backward that B runs; W runs the rest."""
        to_inputs = [g for name, g in self.joint.gradients.items() if name not in self.fixed]
        to_weights = [g for name, g in self.joint.gradients.items() if name in self.fixed]
        return _needed_first(self.joint, to_inputs, to_weights)


def _roots(joint: Joint, starts: Sequence[str], grads: Mapping[str, Node | None]) -> dict[str, list[str]]:
    """Gradient -> those of ``starts`` that it depends on, where these are not all."""
    every = (1 << len(starts)) - 1
    reached = {tangent: 1 << i for i, tangent in enumerate(joint.tangents)}
    for node in joint.dependent:
        for x in node.all_input_nodes:
            reached[node] = reached.get(node, 0) | reached.get(x, 0)
    bits = {name: reached.get(g, 0) for name, g in grads.items() if g is not None}
    return {
        name: [start for i, start in enumerate(starts) if found & 1 << i]
        for name, found in bits.items()
        if found != every
    }


def _split_backward(
    joint: Joint, grads: Mapping[str, Node | None], known: Mapping[Node, str], fixed: set[str], first: set[Node]
) -> tuple[StepGraph, StepGraph]:
    """B and W of the backward: see the module's docstring."""
    to_inputs = {n: g for n, g in grads.items() if of(n) not in fixed}
    to_weights = {n: g for n, g in grads.items() if n not in to_inputs}
    early = [n for n in joint.dependent if n in first and n.op != "placeholder"]
    late = [n for n in joint.dependent if n not in first and n.op != "placeholder"]
    reached = ancestors([g for g in to_weights.values() if g is not None])
    late = [n for n in late if n in reached]
    behind = set(late)
    stashed = {
        x: stash(x.name) for x in joint.dependent if x in first and x not in known and not behind.isdisjoint(x.users)
    }
    stashed |= {x: stash(x.name) for x in _made_by_both(joint, early, late)}
    direct = {n: g for n, g in to_weights.items() if g is not None and (g in first or g not in joint.dependent)}
    rest = {n: g for n, g in to_weights.items() if n not in direct}
    made = [*to_inputs.items(), *direct.items(), *((name, x) for x, name in stashed.items())]
    split = joint.graph_of(early, made, known, "BackwardInput")
    return split, joint.graph_of(late, list(rest.items()), {**known, **stashed}, "BackwardWeight")


def _made_by_both(joint: Joint, early: Iterable[Node], late: Iterable[Node]) -> list[Node]:
    """What B recomputes and W needs too, or would recompute."""
    taken = [joint.sources(x for node in run for x in node.all_input_nodes) for run in (early, late)]
    made = set(joint.closure(taken[0], joint.recomputed)[1])
    found: dict[Node, None] = {}
    again: set[Node] = set()
    queue = list(taken[1])
    while queue:
        x = queue.pop()
        if x in made and isinstance(x.meta["val"], torch.Tensor):
            found[x] = None
        elif x in joint.recomputed and x not in again:
            again.add(x)
            queue += joint.sources(x.all_input_nodes)
    return sorted(found, key=joint.order.__getitem__)


def _needed_first(joint: Joint, inputs: Iterable[Node | None], weights: Iterable[Node | None]) -> set[Node]:
    """Nodes that lead to the gradient of an input, or to those of two or more parameters, together with the entries of
    their tuples."""
    needed = ancestors([g for g in inputs if g is not None]) & set(joint.dependent)
    reach = {g: 1 << i for i, g in enumerate(g for g in weights if g is not None)}
    for node in reversed(list(joint.dependent)):
        bits = reach.get(node, 0)
        for user in node.users:
            bits |= reach.get(user, 0) if user in joint.dependent else 0
        reach[node] = bits
        if bits.bit_count() > 1:
            needed.add(node)
    for node in joint.dependent:
        if isinstance(node.meta.get("val"), (tuple, list)) and node in needed:
            needed |= set(node.users) & set(joint.dependent)
    return needed


def lowered(gm: GraphModule) -> GraphModule:
    """A graph without a backward, in the operators of step graphs."""
    specs = placeholders(gm)
    own_outputs(gm, [])
    return Joint(gm, [False for _ in specs], (), {}).forward()


def _joint(
    gm: GraphModule, active: list[int], fixed: Iterable[str], sums: Mapping[str, torch.dtype], early: bool
) -> Joint:
    """The joint graph with a gradient for every placeholder that can have one and that an active output depends on."""
    values = outputs(gm)
    reached = ancestors([values[i] for i in active])
    return Joint(gm, [has_gradient(n) and n in reached for n in placeholders(gm)], fixed, sums, early)


def own_outputs(gm: GraphModule, active: list[int]) -> None:
    """Detach every output that is not active, so that it gets no tangent, and give every output a storage of its own,
    since an output that is a view would be returned differently. Active outputs that are no losses are made contiguous:
    tangents have the strides of their outputs."""
    out = output_node(gm)
    values: list[Any] = []
    given = outputs(gm)
    for i, value in enumerate(given):
        if isinstance(value, Node):
            owned = not _may_alias(value) and value not in given[:i]
            owned = owned and (i not in active or value.meta["val"].is_contiguous())
            made = value
            if i not in active and has_gradient(value):
                made = insert_call(out, aten.detach.default, (made,), like=value)
            if not owned:
                how = {"memory_format": torch.contiguous_format} if i in active else {}
                made = insert_call(out, aten.clone.default, (made,), how, like=value)
            inherit(made, value, TYPES)
            value = made
        values.append(value)
    out.args = (tuple(values),)
    gm.recompile()


def _may_alias(value: Node) -> bool:
    """Whether an output may share storage with an input or with another value."""
    if is_conversion(value):
        return conversion(*map(parse_placement, map(str, value.args[-2:]))) in ("none", "slice")
    # products of values with more than two dims end in a view of a product of matrices
    return value.op == "placeholder" or value.target in PRODUCTS or aliases(value.target) or part_of_view(value)

"""differentiate: from a local graph to its step graphs, forward (F) and backward (B), without autograd at run time.

Consumes    a local graph.
Guarantees  F returns the outputs and what B needs; B takes that, parameters and one tangent per loss, and returns one
            gradient per trainable parameter. F saves no views (it saves their base), no tuples, and nothing that
            derives from parameters alone: B makes it again, so that gathered ZeRO weights die in between.
Leaves      the operators: they are AOTAutograd's.

    F:  y = mm(x, t(gather(w)))         -->    saves x
    B:  dx = mm(dy, gather(w))                 gathers w again
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.adapters.aot import joint_graph
from autopar.conversions import exchange
from autopar.graph import add_placeholder, ancestors, has_gradient, is_call, output_node, placeholders
from autopar.steps import StepGraphs

aten = torch.ops.aten

# A view costs nothing to make again, and saving it would keep its base alive anyway.
VIEWS = {
    getattr(aten, name).default
    for name in (
        "view",
        "t",
        "permute",
        "expand",
        "unsqueeze",
        "alias",
        "detach",
        "_unsafe_view",
        "squeeze",
        "diagonal",
    )
} | {
    aten.transpose.int,
    aten.slice.Tensor,
    aten.select.int,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.split_with_sizes.default,
}
VIEWS |= {aten.split.Tensor, aten.unbind.int}


def differentiate(gm: GraphModule, train: bool = True) -> StepGraphs:
    """Make the step graphs of a local graph. Outputs that are scalars with a gradient are losses; others get none."""
    losses = _detach_other_outputs(gm, train)
    specs = placeholders(gm)
    wanted = [has_gradient(n) and bool(losses) and _reaches(n, losses, gm) for n in specs]
    joint = joint_graph(gm, wanted)
    names = [n.name for n in specs]
    nodes = placeholders(joint)
    outs = list(output_node(joint).args[0])  # type: ignore[arg-type]
    count = len(output_node(gm).args[0])  # type: ignore[arg-type]
    if not any(wanted):
        return StepGraphs(_forward(joint, nodes, names, outs[:count], [])[0], None, names, count)
    primals, tangents = nodes[: len(names)], nodes[len(names) :]
    renamed = dict(zip(primals, names, strict=True))
    gradients = [(n, g) for n, g, w in zip(names, outs[count:], wanted, strict=True) if w]
    kinds = {s.node: s.kind for s in gm.meta["signature"].inputs}
    weights = {p for p in primals if kinds[renamed[p]] in ("parameter", "buffer", "constant")}
    split = _Split(primals, weights, tangents, outs[:count], [g for _, g in gradients if g is not None])
    saved = split.saved
    forward, _ = _forward(joint, primals, names, outs[:count], saved)
    backward, inputs = split.backward(renamed, [g for _, g in gradients])
    return StepGraphs(
        forward, backward, names, count,
        saved=[n.name for n in saved], backward_inputs=inputs, tangents=len(tangents),
        losses=losses, gradients=[n for n, _ in gradients],
    )  # fmt: skip


def lowered(gm: GraphModule) -> GraphModule:
    """A graph that nobody differentiates, in the operators of step graphs."""
    specs = placeholders(gm)
    traced = joint_graph(gm, [False for _ in specs])
    return _forward(traced, placeholders(traced), [n.name for n in specs], list(output_node(traced).args[0]), [])[0]  # type: ignore[arg-type]


def _detach_other_outputs(gm: GraphModule, train: bool) -> list[int]:
    """Indices of the losses. Every other output with a gradient is detached, or AOTAutograd would ask for its tangent;
    every output has storage of its own, or it would be returned in a way that depends on what it is a view of."""
    out = output_node(gm)
    losses: list[int] = []
    values: list[Any] = []
    given = list(out.args[0])  # type: ignore[arg-type]
    for i, value in enumerate(given):
        if isinstance(value, Node):
            loss = train and has_gradient(value) and not value.meta["val"].dim()
            owned = not _may_alias(value) and value not in given[:i]
            with gm.graph.inserting_before(out):
                if loss:
                    losses.append(i)
                elif has_gradient(value):
                    value = gm.graph.call_function(aten.detach.default, (value,))
                if not owned:
                    value = gm.graph.call_function(aten.clone.default, (value,))
        values.append(value)
    out.args = (tuple(values),)
    gm.recompile()
    return losses


def _may_alias(value: Node) -> bool:
    """Whether an output may share storage with an input or with another value."""
    return value.op == "placeholder" or value.target in VIEWS | {aten.reshape.default, exchange} or _part_of_view(value)


def _reaches(node: Node, losses: list[int], gm: GraphModule) -> bool:
    """Whether a loss depends on a placeholder: a parameter that none uses gets no gradient, as in torch."""
    known = gm.meta.get("loss_ancestors")
    if known is None:
        outs: Any = output_node(gm).args[0]
        targets = [outs[i] for i in losses]
        known = gm.meta["loss_ancestors"] = ancestors(targets)
    return node in known


def _forward(
    joint: GraphModule, primals: list[Node], names: list[str], outs: list[Node | None], saved: list[Node]
) -> tuple[GraphModule, dict[Node, Node]]:
    """The part of the joint graph that makes the outputs and the saved values."""
    keep = ancestors([n for n in [*outs, *saved] if isinstance(n, Node)])
    graph, copies = Graph(), dict[Node, Node]()
    for node, name in zip(primals, names, strict=True):
        copies[node] = add_placeholder(graph, name)
        copies[node].meta = dict(node.meta)
    for node in joint.graph.nodes:
        if node.op == "call_function" and node in keep:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] if isinstance(n, Node) else n for n in [*outs, *saved]))
    return GraphModule(torch.nn.Module(), graph, "Forward"), copies


class _Split:
    """Which values B makes, and which it is given."""

    def __init__(
        self, primals: list[Node], weights: set[Node], tangents: list[Node], outs: list[Node | None], grads: list[Node]
    ) -> None:
        self.primals, self.tangents = set(primals), tangents
        self.forward = ancestors(n for n in outs if isinstance(n, Node))
        self.order = {n: i for i, n in enumerate(primals[0].graph.nodes)}
        self.parameter_only = self._parameter_only(weights)
        self.saved: list[Node] = []
        self.given: set[Node] = set()
        self.dependent = self._dependent(ancestors(grads))
        for node in self.dependent:
            for x in node.all_input_nodes:
                self._give(x)
        for g in grads:
            self._give(g)
        self.saved.sort(key=self.order.__getitem__)

    def _dependent(self, needed: set[Node]) -> dict[Node, None]:
        """What depends on a tangent, in order."""
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

    def _give(self, x: Node) -> None:
        """Make a value available to B: as an input, or made again from what is."""
        if x in self.dependent or x in self.given:
            return
        self.given.add(x)
        if x in self.primals:
            return
        cheap = x.target in VIEWS or _part_of_view(x) or not x.all_input_nodes
        if cheap or x in self.parameter_only or not self._made_by_forward(x):
            for operand in x.all_input_nodes:
                self._give(operand)
        else:
            self.saved.append(x)

    def _made_by_forward(self, x: Node) -> bool:
        """F makes it, or makes the tuple it is an entry of: the entry is saved then, never the tuple."""
        return x in self.forward or (is_call(x, operator.getitem) and x.args[0] in self.forward)

    def backward(self, renamed: dict[Node, str], grads: list[Node | None]) -> tuple[GraphModule, list[str]]:
        """Nodes that are made again are copied right before their first use, so that gathers stay next to it."""
        graph, copies = Graph(), dict[Node, Node]()
        primals = [(n, renamed[n]) for n in self.order if n in self.primals and n in self.given]
        for node, name in [*primals, *((n, n.name) for n in self.saved), *((n, n.name) for n in self.tangents)]:
            copies[node] = add_placeholder(graph, name)
            copies[node].meta = dict(node.meta)
        inputs = [n.name for n in graph.nodes]

        def copy(node: Node) -> Node:
            if node not in copies:
                for x in node.all_input_nodes:
                    copy(x)
                copies[node] = graph.node_copy(node, copies.__getitem__)
            return copies[node]

        for node in self.dependent:
            copy(node)
        graph.output(
            tuple(self._owned(graph, copy(g), i, grads) if g is not None else None for i, g in enumerate(grads))
        )
        return GraphModule(torch.nn.Module(), graph, "Backward"), inputs

    def _owned(self, graph: Graph, value: Node, i: int, grads: list[Node | None]) -> Node:
        """A gradient in storage of its own: optimizers write to it. The same value twice, or an input, is cloned."""
        shared = grads[i] in grads[:i] or value.op == "placeholder" or is_call(value, aten.expand.default)
        if not shared:
            return value
        own = graph.call_function(aten.clone.default, (value,), {"memory_format": torch.contiguous_format})
        own.meta = dict(value.meta)
        return own


def _part_of_view(node: Node) -> bool:
    """getitem of a split: a view as well."""
    return is_call(node, operator.getitem) and isinstance(node.args[0], Node) and node.args[0].target in VIEWS

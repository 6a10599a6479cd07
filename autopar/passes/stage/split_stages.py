"""split_stages: a local graph becomes the graphs of its stages, by dataflow.

Consumes    a local graph without microbatch conversions, and the stage of each main node.
Guarantees  every stage is a graph of its own. Its inputs: parameters as they are used, buffers, values that depend on
            no parameter, and values received from earlier stages. Its outputs: values for later stages, losses, new
            buffer values. A value that several later stages use is forwarded from user to user (edges); a stage that
            uses and forwards a value does not return a copy of it, whose gradient would be lost.
Leaves      one computation of each main value. Values that depend on parameters alone (a position bias) are recomputed
            by every stage that uses them, so that their gradients are summed as those of tied weights are. Values that
            depend on no parameter (rotary tables, masks, shifted labels) are computed once, by a prologue: per step if
            they are the same for all microbatches, else per microbatch.

    h0 = layer0(embed(ids)); h1 = layer1(h0, cos); loss = head(h1)
        -->
    once: cos       stage 0: (ids) -> h0      stage 1: (h0, cos, labels) -> loss       edge h0: 0 -> 1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.adapters.fx.lazy import graph_module
from autopar.ir.custom_backward import own_backward_arguments
from autopar.ir.flow import Flow, home_of
from autopar.ir.graph import (
    add_placeholder,
    copy_node,
    extracted,
    has_gradient,
    is_call,
    loss_places,
    outputs,
)
from autopar.ir.signature import Signature
from autopar.ops.gradient import OWN_BACKWARD
from autopar.ops.traits import is_view
from autopar.passes.autodiff.joint import part_of_view
from autopar.passes.stage.slice_tokens import of_slice
from autopar.schedule.order import P2PEdge
from autopar.steps.graphs import output, output_place


@dataclass
class StageGraph:
    """One stage: its graph, the kind of each result (see `differentiate`), the names of its placeholders that are
    parameters, buffers or constants. parameters: original names of its parameters. used: used node -> its parameter,
    where the conversions between stored and used parameters are split off; None where they are in the graph."""

    graph: GraphModule
    results: dict[str, str]
    fixed: list[str]
    mutations: dict[str, str]
    parameters: list[str]
    used: dict[Node, Node] | None = None


@dataclass
class StageSplit:
    """The stages of a model, the edges between them, and the prologue's graphs with the names of their results."""

    parts: list[StageGraph]
    edges: list[P2PEdge] = field(default_factory=list)
    once: GraphModule | None = None
    each: GraphModule | None = None


def split_stages(gm: GraphModule, flow: Flow, part_of: Mapping[Node, int], count: int) -> StageSplit:
    """Split a local graph into ``count`` stages; ``part_of``: main node -> stage. ``gm`` is not changed."""
    cutter = _Cutter(gm, flow, part_of, count)
    parts = [cutter.part(k) for k in range(count)]
    cutter.refuse_split_backwards()
    once = cutter.prologue([n for n in cutter.frontier if n not in flow.repeated], "Once")
    each = cutter.prologue([n for n in cutter.frontier if n in flow.repeated], "Each")
    return StageSplit(parts, cutter.edges, once, each)


def as_one_stage(gm: GraphModule, tangents: Sequence[str] = (), used: Mapping[Node, Node] | None = None) -> StageSplit:
    """A local graph as a single stage. ``tangents``: names of outputs that receive gradients, besides the losses.
    ``used``: used node -> its parameter, to split off the conversions between them; then the graph is a new one."""
    signature = gm.meta["signature"]
    results, losses = {}, loss_places(gm)
    for i, (spec, value) in enumerate(zip(signature.outputs, outputs(gm), strict=True)):
        kind = "loss" if i in losses else spec.kind
        results[output(i)] = "sent" if spec.name in tangents and has_gradient(value) else kind
    fixed = [s.node for s in signature.inputs if s.kind in ("parameter", "buffer", "constant")]
    held = [s.name for s in signature.inputs if s.kind == "parameter"]
    if used is not None:
        stored = {p.name for p in used.values()}
        gm, fixed = _behind_conversions(gm, used), [*(u.name for u in used), *(n for n in fixed if n not in stored)]
    return StageSplit(
        [StageGraph(gm, results, fixed, _mutations(signature, results), held, dict(used) if used else None)]
    )


def _behind_conversions(gm: GraphModule, used: Mapping[Node, Node]) -> GraphModule:
    """A graph that takes parameters as they are used."""
    graph, copies = Graph(), dict[Node, Node]()
    between = set(used.values())
    for node, parameter in used.items():
        while node is not parameter:
            between.add(node)
            node = node.args[0]  # type: ignore[assignment]
    inputs = [n for n in gm.graph.nodes if n in used or (n.op == "placeholder" and n not in between)]
    for node in inputs:
        copies[node] = add_placeholder(graph, node.name, like=node)
        val = node.meta["val"]
        copies[node].meta["val"] = val.new_empty(val.shape) if node in used else val
    for node in gm.graph.nodes:
        if node.op == "call_function" and node not in between:
            copy_node(graph, node, copies)
    graph.output(tuple(copies[x] if isinstance(x, Node) else x for x in outputs(gm)))
    made = graph_module(graph, "Part")
    made.meta = dict(gm.meta)
    return made


def _mutations(signature: Signature, results: Mapping[str, str]) -> dict[str, str]:
    """Output -> name of the buffer whose new value it is."""
    return {name: signature.outputs[output_place(name)].name for name, kind in results.items() if kind == "mutation"}


class _Cutter:
    def __init__(self, gm: GraphModule, flow: Flow, part_of: Mapping[Node, int], count: int) -> None:
        self.gm, self.flow, self.part_of, self.count = gm, flow, part_of, count
        self.order = {n: i for i, n in enumerate(gm.graph.nodes)}
        self.frontier: dict[Node, None] = {}  # values of the prologue
        self.kept = self._outputs()
        self.leads = self._leads()
        self.edges, self.sent, self.received = self._edges()
        self.backwards: dict[Node, list[int]] = {}  # tokens -> the stages that have them

    def _outputs(self) -> list[list[tuple[str, str, Node]]]:
        """Per stage: (name, kind, value) of the model's outputs that it computes."""
        found: list[list[tuple[str, str, Node]]] = [[] for _ in range(self.count)]
        specs, losses = self.gm.meta["signature"].outputs, loss_places(self.gm)
        for i, (spec, value) in enumerate(zip(specs, outputs(self.gm), strict=True)):
            if not isinstance(value, Node):
                continue
            home = home_of(value, self.part_of, self.flow)
            part = self.count - 1 if home is None else home
            if spec.kind == "own":  # keys for later token slices: they receive a gradient like a sent value
                found[part].append((value.name, "sent", value))
                continue
            found[part].append((output(i), "loss" if i in losses else spec.kind, value))
        return found

    def _leads(self) -> set[Node]:
        """Main values through which a gradient comes from a loss."""
        starts = {value for part in self.kept for _, kind, value in part if kind in ("loss", "sent")}
        found = set[Node]()
        for node in sorted(self.part_of, key=self.order.__getitem__, reverse=True):
            if has_gradient(node) and (node in starts or not found.isdisjoint(node.users)):
                found.add(node)
        return found

    def _comes_back(self, node: Node, target: int) -> bool:
        """Whether stages from ``target`` on compute a gradient of a value."""
        users = (u for u in node.users if self.part_of.get(u, -1) >= target)
        return has_gradient(node) and not self.leads.isdisjoint(users)

    def _edges(self) -> tuple[list[P2PEdge], list[list[Node]], list[list[Node]]]:
        """Main values that later stages use travel from user to user."""
        edges: list[P2PEdge] = []
        sent: list[list[Node]] = [[] for _ in range(self.count)]
        received: list[list[Node]] = [[] for _ in range(self.count)]
        for node in self.flow.main:
            home = self.part_of[node]
            users = sorted({self.part_of[u] for u in node.users if u in self.part_of} - {home})
            assert all(k > home for k in users), f"split_stages: {node.name} of stage {home} is used before it exists"
            for source, target in zip([home, *users], users, strict=False):
                val = node.meta["val"]
                assert isinstance(val, torch.Tensor), f"split_stages: the tuple {node.name} crosses a stage boundary"
                edges.append(
                    P2PEdge(node.name, source, target, self._comes_back(node, target), (tuple(val.shape),), val.dtype)
                )
                received[target].append(node)
            if users:
                sent[home].append(node)
        return edges, sent, received

    # --- stages -------------------------------------------------------------------------------------------

    def part(self, k: int) -> StageGraph:
        """The graph of one stage."""
        graph, copies = Graph(), dict[Node, Node]()
        kinds_of_sent = ((n.name, "sent" if self._comes_back(n, k + 1) else "output", n) for n in self.sent[k])
        results = [*self.kept[k], *kinds_of_sent]
        own = [n for n in self.flow.main if self.part_of[n] == k]
        wanted = [*own, *(value for _, _, value in results)]
        inputs = self._inputs(k, wanted)
        for node in inputs:
            copies[node] = add_placeholder(graph, node.name, like=node)
            # received values are contiguous, whatever their strides were; gradients of gathered weights are as stored
            copies[node].meta["val"] = node.meta["val"].new_empty(node.meta["val"].shape)

        for node in own:
            copy_node(graph, node, copies)
        graph.output(tuple(copy_node(graph, value, copies) for _, _, value in results))
        for token in (n for n in copies if is_call(n, OWN_BACKWARD)):
            self.backwards.setdefault(token, []).append(k)
        gm = graph_module(graph, f"Part{k}")
        gm.meta["signature"] = signature = self.gm.meta["signature"]
        kinds = {name: kind for name, kind, _ in results}
        fixed = [n.name for n in inputs if n in self.flow.used or self.flow.kinds.get(n.name) in ("buffer", "constant")]
        used = {n: self.flow.used[n] for n in inputs if n in self.flow.used}
        names = {s.node: s.name for s in signature.inputs}
        held = list(dict.fromkeys(names[p.name] for p in used.values()))
        return StageGraph(gm, kinds, fixed, _mutations(signature, kinds), held, used)

    def _inputs(self, k: int, wanted: Iterable[Node]) -> list[Node]:
        """Where the stage begins: used parameters, received values, and values that depend on no parameter."""
        found: set[Node] = set()
        seen: set[Node] = set()
        queue = list(wanted)
        while queue:
            node = queue.pop()
            if node in seen:
                continue
            seen.add(node)
            elsewhere = node in self.part_of and self.part_of[node] != k
            if elsewhere or node in self.flow.used or node.op == "placeholder":
                found.add(node)
            elif self.flow.is_free(node) and not self._is_view(node) and not of_slice(node):
                found.add(node)
                self.frontier[node] = None
            else:
                queue += node.all_input_nodes
        return sorted(found, key=self.order.__getitem__)

    @staticmethod
    def _is_view(node: Node) -> bool:
        """Whether it is a view of a prologue's value, recomputed where it is used: sending it would copy it."""
        return bool(node.all_input_nodes) and (is_view(node.target) or part_of_view(node))

    def refuse_split_backwards(self) -> None:
        """Raises ValueError for an autograd function of parameters alone that several stages would recompute: each
        would run its backward on a part of the gradient."""
        for token, parts in self.backwards.items():
            if len(parts) > 1:
                raise ValueError(
                    f"pipeline: the result of the autograd function {own_backward_arguments(token)[3]} is used by "
                    f"stages {', '.join(map(str, parts))}, and its backward needs their gradients together; call the "
                    "function in each stage that uses it, or choose split points such that one stage has all uses"
                )

    # --- prologue -----------------------------------------------------------------------------------------

    def prologue(self, wanted: list[Node], title: str) -> GraphModule | None:
        """A graph that computes values which depend on no parameter; its results have their nodes' names in
        ``meta["results"]``."""
        if not wanted:
            return None
        wanted = sorted(wanted, key=self.order.__getitem__)
        gm = extracted(self.gm, wanted, title)
        gm.meta["results"] = [n.name for n in wanted]
        return gm

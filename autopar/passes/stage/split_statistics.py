"""split_statistics: the pre-pass of a step, by round and by stage.

Consumes    the graph of a microbatch's addends to totals that depend on weights (`split_prologue`), where one total may
            depend on another, and the stage of every value of the model.
Guarantees  the graph of a round uses totals of earlier rounds only. Each value that depends on weights and on inputs is
            computed once per microbatch, as early as possible; a later round keeps it, a later stage receives it.
            Values that depend on weights alone or on no weight, and views, are recomputed where they are used.
Leaves      the operators, and their order within a graph.

    h = layer0(x); e0 = router0(h); y = experts0(h, capped(total_0)); e1 = router1(y)
        -->
    round 0: (x) -> total_0, h            round 1: (h, total_0) -> total_1
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, GraphModule, Node

from autopar.adapters.fx.lazy import graph_module
from autopar.ir.flow import Flow
from autopar.ir.graph import add_placeholder, copy_node, outputs, placeholders, reach
from autopar.ops.traits import is_view
from autopar.passes.autodiff.differentiate import lowered
from autopar.passes.autodiff.joint import part_of_view
from autopar.schedule.order import P2PEdge
from autopar.steps.graphs import GlobalStatistics, StepGraph

Place = tuple[int, int]  # round, stage


def split_pre_pass(gm: GraphModule, flow: Flow, part_of: Mapping[str, int], parts: int) -> list[GlobalStatistics]:
    """``flow``: of ``gm``. ``part_of``: name of a value of the model -> its stage; other values belong to the stage
    that has all of their operands."""
    cutter = _PrePassSplitter(gm, flow, part_of)
    count = 1 + max(cutter.round_of[x] for x in cutter.totals)
    return [cutter.round(r, parts) for r in range(count)]


class _PrePassSplitter:
    def __init__(self, gm: GraphModule, flow: Flow, part_of: Mapping[str, int]) -> None:
        self.order = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.totals: dict[Node, str] = dict(zip(outputs(gm), gm.meta["results"], strict=True))
        self.addend_of = {name: node for node, name in self.totals.items()}
        self.round_of: dict[Node, int] = {}
        self.part_of: dict[Node, int] = {}
        main = {*flow.main, *self.totals}
        for node in (n for n in gm.graph.nodes if n.op != "output"):
            self.round_of[node] = max((self._known_in(x) for x in node.all_input_nodes), default=0)
            if node in main:
                before = max((self.part_of.get(x, 0) for x in node.all_input_nodes), default=0)
                self.part_of[node] = part_of.get(node.name, before)
        self.own: dict[Place, list[Node]] = {}
        for node in self.part_of:
            self.own.setdefault(self._place(node), []).append(node)
        self.given = {place: self._given(place) for place in self.own}
        takers = [(x, place) for place, given in self.given.items() for x in given if x in self.part_of]
        self.taken_by: dict[Node, list[Place]] = {}
        for x, place in takers:
            self.taken_by.setdefault(x, []).append(place)

    def _known_in(self, x: Node) -> int:
        """The first round that can use a value."""
        return self.round_of[self.addend_of[x.name]] + 1 if x.name in self.addend_of else self.round_of[x]

    def _place(self, node: Node) -> Place:
        return self.round_of[node], self.part_of[node]

    def _given(self, place: Place) -> list[Node]:
        """The inputs of the graph of a round and stage: placeholders, and values of other graphs."""

        def given(x: Node) -> bool:
            elsewhere = x in self.part_of and self._place(x) != place and not _is_view(x)
            return elsewhere or x.op == "placeholder"

        met = reach(self.own[place], lambda x: () if given(x) else x.all_input_nodes)
        return sorted(filter(given, met), key=self.order.__getitem__)

    def round(self, number: int, parts: int) -> GlobalStatistics:
        """The graphs of all stages, and the edges between them."""
        graphs = [self._graph((number, k)) if (number, k) in self.own else None for k in range(parts)]
        edges = [
            P2PEdge(x.name, k, to, False, (tuple(x.meta["val"].shape),), x.meta["val"].dtype)
            for k in range(parts)
            for x in self.own.get((number, k), ())
            for to in sorted({part for _, part in self.taken_by.get(x, ())} - {k})
        ]
        assert all(edge.source < edge.target for edge in edges), "split_statistics: a value is used before it exists"
        return GlobalStatistics(graphs, edges, [name for x, name in self.totals.items() if self.round_of[x] == number])

    def _graph(self, place: Place) -> StepGraph:
        graph, copies = Graph(), dict[Node, Node]()
        for x in self.given[place]:
            copies[x] = add_placeholder(graph, x.name, like=x)
            if x in self.part_of:
                copies[x].meta["val"] = x.meta["val"].new_empty(x.meta["val"].shape)
        names = {copies[x].name: x.name for x in self.given[place]}
        for node in self.own[place]:
            copy_node(graph, node, copies)
        results = [(self.totals[x], x) for x in self.own[place] if x in self.totals]
        results += [(x.name, x) for x in self.own[place] if x in self.taken_by]
        graph.output(tuple(copies[x] for _, x in results))
        made = lowered(graph_module(graph, "PrePass"))
        return StepGraph(made, [names[x.name] for x in placeholders(made)], [name for name, _ in results])


def _is_view(node: Node) -> bool:
    """Whether it is a view of a value of another graph, which is recomputed: sending it would copy it."""
    return bool(node.all_input_nodes) and (is_view(node.target) or part_of_view(node))

"""Collectives start early and are waited for late, within memory: beside them runs what is not made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from autopar.ir.graph import copy_graph, is_call
from autopar.ir.live_values import peak_of_values
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.passes.step.schedule_collectives import ScheduleCollectives
from autopar.rewrite.compilation import Compilation
from autopar.steps.graphs import StepGraph
from tests.support.cases import Cell, compile_cell

ours, aten = torch.ops.autopar, torch.ops.aten
EXCHANGES = (ours.all_to_all_rows.default, ours.all_to_all.default)


def node(graph: Graph, target: Any, *args: Any) -> Node:
    made = graph.call_function(target, args)
    made.meta["val"] = torch.empty(64, 64, device="meta")
    return made


def exchange(graph: Graph, x: Node) -> Node:
    return node(graph, ours.all_to_all_rows.default, x, x, False, "ep", 2)


def scheduled(graph: Graph, *results: Node, **sizes: int) -> list[str]:
    """The calls of a graph in their new order."""
    graph.output(results)
    gm = ScheduleCollectives().apply(GraphModule(nn.Module(), graph), Compilation(Mesh.of(**sizes)))
    return [str(node.target).split(".")[1] for node in gm.graph.nodes if node.op == "call_function"]


def given(graph: Graph, name: str) -> Node:
    made = graph.placeholder(name)
    made.meta["val"] = torch.empty(64, 64, device="meta")
    return made


def test_before_and_after() -> None:
    """Two exchanges, the second made of the first: what is made of neither runs beside the second."""
    graph = Graph()
    a = given(graph, "a")
    weight = node(graph, aten.mm.default, a, a)
    first = exchange(graph, node(graph, aten.neg.default, a))
    second = exchange(graph, node(graph, aten.relu.default, first))
    y = node(graph, aten.exp.default, second)
    z = node(graph, aten.sin.default, a)
    names = scheduled(graph, weight, y, z, ep=2)
    assert names == ["neg", "all_to_all_rows", "relu", "all_to_all_rows", "mm", "sin", "exp"]


def test_the_example_of_the_page() -> None:
    graph = Graph()
    a, p = given(graph, "a"), given(graph, "p")
    w = node(graph, aten.mm.default, a, a)
    x = node(graph, ours.all_reduce.default, node(graph, aten.neg.default, a), "tp", "sum")
    y = node(graph, aten.exp.default, x)
    v = node(graph, ours.all_gather.default, p, 0, [], "dp", 1)
    names = scheduled(graph, w, node(graph, aten.bmm.default, y, v), tp=2, dp=2)
    assert names == ["neg", "all_reduce", "all_gather", "mm", "exp", "bmm"]


def beside(step: StepGraph) -> list[set[str]]:
    """Of each exchange: the kinds of calls between its start and its first user."""
    nodes = list(step.graph.graph.nodes)
    found = []
    for node in (x for x in nodes if is_call(x, *EXCHANGES)):
        at, until = nodes.index(node), min(map(nodes.index, node.users))
        found.append({name for x in nodes[at + 1 : until] for name in str(x.target).split(".")[1:2]})
    return found


@pytest.mark.parametrize("dispatch", ["alltoall_dedup", "alltoall"])
def test_what_runs_beside(dispatch: str) -> None:
    """Shared experts both ways; gradients of experts' weights beside those of tokens on their way back."""
    made = compile_cell(Cell("deepseek_v3", Mesh.of(ep=2), Options(token_dispatcher=dispatch))).stage
    assert made.backward_reduce is not None
    forward, backward = beside(made.forward), beside(made.backward_reduce)
    assert "mm" in forward[-1]
    assert sum("mm" in calls for calls in backward) > 0  # not at the first, where memory is at its peak
    assert any("grouped_mm_weight_grad" in calls for calls in backward[1:])


def test_others_stay_as_they_are() -> None:
    graph = Graph()
    a = given(graph, "a")
    before = node(graph, aten.mm.default, a, a)
    total = node(graph, ours.all_reduce.default, before, "cp", "sum")
    assert scheduled(graph, node(graph, aten.neg.default, total), cp=2) == ["mm", "all_reduce", "neg"]


CELLS = [
    Cell("llama", Mesh.of(dp=2), Options(zero=3)),
    Cell("llama", Mesh.of(tp=2), Options(sequence_parallel=True)),
    Cell("llama", Mesh.of(tp=2, dp=2), Options(zero=3, activation_checkpoint="full")),
    Cell("llama", Mesh.of(dp=2), Options(zero=3, memory_limit="1MB", activation_checkpoint="none")),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_memory_stays(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is at most that of the given order; an equal graph gets the same order."""
    seen: list[tuple[int, int]] = []
    apply = ScheduleCollectives.apply

    def watched(self: ScheduleCollectives, gm: GraphModule, ctx: Compilation) -> GraphModule:
        held = {n.name for n in gm.graph.nodes if n.op == "placeholder"} - set(gm.meta["freed"])
        before = peak_of_values(gm, held)
        again, made = apply(self, copy_graph(gm), ctx), apply(self, gm, ctx)
        assert [n.target for n in again.graph.nodes if n.op != "placeholder"] == [
            n.target for n in made.graph.nodes if n.op != "placeholder"
        ]
        seen.append((before, peak_of_values(made, held)))
        return made

    monkeypatch.setattr(ScheduleCollectives, "apply", watched)
    compile_cell(cell)
    assert len(seen) > 1
    assert all(after <= before for before, after in seen), seen

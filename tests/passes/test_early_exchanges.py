"""Exchanges of rows start early and are waited for late: beside them runs what is not made of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from autopar.ir.graph import is_call
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.passes.step.early_exchanges import EarlyExchanges
from autopar.rewrite.compilation import Compilation
from autopar.steps.graphs import StepGraph
from tests.support.cases import Cell, compile_cell

ours, aten = torch.ops.autopar, torch.ops.aten
EXCHANGES = (ours.all_to_all_rows.default, ours.all_to_all.default)


def exchange(graph: Graph, x: Node) -> Node:
    return graph.call_function(ours.all_to_all_rows.default, (x, x, False, "ep", 2))


def test_before_and_after() -> None:
    """The example of the page, and one more exchange that is made of the first."""
    graph = Graph()
    a = graph.placeholder("a")
    weight = graph.call_function(aten.mm.default, (a, a))
    first = exchange(graph, graph.call_function(aten.neg.default, (a,)))
    second = exchange(graph, graph.call_function(aten.relu.default, (first,)))
    y = graph.call_function(aten.exp.default, (second,))
    z = graph.call_function(aten.sin.default, (a,))
    graph.output((weight, y, z))
    gm = EarlyExchanges().apply(GraphModule(nn.Module(), graph), Compilation(Mesh.of(ep=2)))
    names = [str(node.target).split(".")[1] for node in gm.graph.nodes if node.op == "call_function"]
    assert names == ["neg", "all_to_all_rows", "mm", "relu", "all_to_all_rows", "sin", "exp"]


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
    assert "mm" in backward[0] and "grouped_mm_weight_grad" in backward[-1] and "mm" in backward[-1]


def test_others_stay_as_they_are() -> None:
    graph = Graph()
    a = graph.placeholder("a")
    before = graph.call_function(aten.mm.default, (a, a))
    whole = graph.call_function(ours.all_to_all.default, (a, 0, [], 1, [], "cp", 2))
    graph.output((before, graph.call_function(aten.neg.default, (whole,))))
    gm = GraphModule(nn.Module(), graph)
    names = [node.name for node in gm.graph.nodes]
    assert [n.name for n in EarlyExchanges().apply(gm, Compilation(Mesh.of(cp=2))).graph.nodes] == names

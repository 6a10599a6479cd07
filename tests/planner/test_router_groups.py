"""Routers that let a token use some groups of experts: found in graphs, checked against nodes, known to estimates."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from torch.fx import GraphModule

from autopar.compile.model import compile_graph
from autopar.ir.expert_layers import dispatches
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.planner.experts.expert_axis import groups_on_nodes, router_groups
from autopar.testing.harness import check_model
from autopar.testing.reference import LIMIT, eager
from autopar.token_dispatchers import TOKEN_DISPATCHERS, Routing
from tests.support.capture_cache import captured_once
from tests.support.subjects import tiny

LIMITED = {"n_group": 4, "topk_group": 2, "n_routed_experts": 8, "num_experts_per_tok": 4}


def graph_of(name: str, **sizes: Any) -> GraphModule:
    return captured_once(*tiny(name, **sizes), lift_to_float64=True)


def test_groups_are_found_by_dataflow() -> None:
    limited = graph_of("deepseek_v3", **LIMITED)
    assert {router_groups(node) for node in dispatches(limited)} == {(4, 2)}
    assert {router_groups(node) for node in dispatches(graph_of("qwen3_moe"))} == {(1, 1)}


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("ep%4=switch", "uses 2 of 4 groups of experts, and each of 2 nodes has 2: it reaches at most 2 of them"),
        ("ep%1=switch", "warning: .* which do not divide over 8 nodes: it reaches up to 4 of them; .* such as 4"),
        ("", ""),
    ],
)
def test_a_plan_says_whether_groups_fall_on_nodes(nodes: str, said: str) -> None:
    """4 groups of 2 experts, 8 ranks with an expert each; a token has 4 of them."""
    graph = graph_of("deepseek_v3", **LIMITED)
    plan = compile_graph(graph, Mesh.of(ep=8), Options(topology=nodes), outputs=()).plan
    found = [reason for subject, reason in plan.notes if subject.startswith("router of")]
    assert len(found) == bool(said)
    for reason in found:
        assert reason.startswith("warning") == said.startswith("warning")
        assert re.search(said, reason), reason


def test_no_groups_no_word() -> None:
    assert groups_on_nodes(Routing(8, 2, 4, 2)) == ""
    assert groups_on_nodes(Routing(8, 2, 4, 4, 4, 2)) == ""  # one node


@pytest.mark.parametrize(("ranks", "per_node"), [(4, 2), (8, 2), (4, 4)])
@pytest.mark.parametrize(("groups", "limit"), [(1, 1), (4, 2)])
def test_at_most(ranks: int, per_node: int, groups: int, limit: int) -> None:
    """Copies of a token of rank 0 by every choice of experts that its router allows: the mean is what even routing
    sends (over all ranks), and none is beyond the most."""
    routing = Routing(8, 3, ranks, per_node, groups, limit)
    most = {name: row.most_copies(routing) for name, row in TOKEN_DISPATCHERS.items()}
    for name, row in TOKEN_DISPATCHERS.items():
        assert all(e <= m + 1e-9 for e, m in zip(row.copies(routing), most[name], strict=True)), name
    for chosen in itertools.combinations(range(8), 3):
        if len({e * groups // 8 for e in chosen}) > limit:
            continue
        for home in range(ranks):
            reached = {e * ranks // 8 for e in chosen} - {home}
            near = {r for r in reached if r // per_node == home // per_node}
            nodes = {r // per_node for r in reached} - {home // per_node}
            experts = [e for e in chosen if e * ranks // 8 != home]
            inside = [e for e in experts if e * ranks // 8 // per_node == home // per_node]
            assert len(near) <= most["alltoall_dedup"][0]
            assert len(reached - near) <= most["alltoall_dedup"][1]
            assert len(nodes) <= most["hierarchical"][1]
            assert len(inside) <= most["alltoall"][0]
            assert len(experts) - len(inside) <= most["alltoall"][1]


def test_noise_of_a_router_is_that_of_one_process() -> None:
    """Numbers follow from an element's place in the batch: no rank draws its own."""
    model, batch = tiny("mixtral", layers=1, router_jitter_noise=0.2)
    assert abs(eager(model, batch, 0).loss - eager(tiny("mixtral", layers=1)[0], batch, 0).loss) > 1e-5
    mesh, options = Mesh.of(dp=2, ep=2), Options(microbatches=2, token_dispatcher="alltoall_dedup")
    assert check_model(model, batch, mesh, options).worst < LIMIT

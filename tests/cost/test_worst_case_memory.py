"""Memory at worst: what values have if all tokens choose one rank's experts is what is noted on them."""

from __future__ import annotations

import pytest
import torch

from autopar.compile.model import compile_model
from autopar.cost.memory import memory, memory_at_worst
from autopar.ir.graph import outputs
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.report.summary import summarize
from autopar.testing.harness import MeshRun
from tests.experts.test_experts import Layer, routed

MESH, NODES = Mesh.of(ep=4), "ep%2=switch:450e9,ep/2=switch:50e9"
EVERY = ("allgather", "alltoall", "alltoall_dedup", "hierarchical")


@pytest.mark.parametrize("dispatch", EVERY)
def test_a_rank_that_gets_all(dispatch: str) -> None:
    """16 tokens on each of 4 ranks choose the two experts of rank 1: 128 rows there, none elsewhere."""
    model, batch = Layer(8), routed(64, 8, 2, "any")
    made = compile_model(
        model, batch, MESH, Options(token_dispatcher=dispatch, topology=NODES), lift_to_float64=True, outputs=()
    )
    skewed = {**batch, "expert": torch.tensor([[3, 2]]).expand(64, 2).contiguous()}
    stage = made.stage
    for given in (skewed, batch):
        found = MeshRun(made, model, given, MESH)._run(stage.forward, 0, [{} for _ in range(4)])
        noted = {
            name: node.meta["most_rows"][0]
            for name, node in zip(stage.forward.outputs, outputs(stage.forward.graph), strict=True)
            if name is not None and "most_rows" in node.meta
        }
        assert noted
        most = {name: max(len(of_rank[name]) for of_rank in found) for name in noted}
        assert all(most[name] <= bound for name, bound in noted.items()), (most, noted)
        rows = {name for name, bound in noted.items() if bound == 128}
        assert rows and all((most[name] == 128) == (given is skewed) for name in rows)


@pytest.mark.parametrize("dispatch", EVERY)
def test_the_walk_is_over_what_may_come(dispatch: str) -> None:
    options = Options(token_dispatcher=dispatch, topology=NODES, microbatches=2)
    made = compile_model(Layer(8), routed(64, 8, 2, "any"), MESH, options, lift_to_float64=True, outputs=())
    even, worst = memory(made), memory_at_worst(made)
    assert worst is not None and worst.saved > 2 * even.saved and worst.peak > even.peak
    assert memory(made) == even, "values are what they were"
    assert summarize(made)["memory"]["peak_at_worst"] == worst.peak
    whole = compile_model(Layer(8), routed(64, 8, 2, "any"), Mesh.of(dp=2), outputs=())
    assert memory_at_worst(whole) is None and "peak_at_worst" not in summarize(whole)["memory"]

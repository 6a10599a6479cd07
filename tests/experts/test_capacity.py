"""Experts with a capacity: which pairs are dropped follows from the whole batch, whatever the mesh."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.front_end import capture
from autopar.compile.model import compile_graph, compile_model
from autopar.cost.traffic import step_communication
from autopar.ir.batch import part_of_batch
from autopar.ir.mesh import Mesh
from autopar.lift_to_float64 import LiftFloat32
from autopar.models.hf import exact_experts
from autopar.models.hf_capacity import capped_experts
from autopar.options import Options
from autopar.runtime.mesh.process_groups import dp_rank_and_size, init_mesh
from autopar.testing.harness import MeshRun
from autopar.testing.reference import LIMIT, eager
from tests.experts.test_experts import Layer, routed
from tests.support.capture_cache import captured_once
from tests.support.ranks import run_ranks
from tests.support.subjects import SEED, tiny

MESHES = [
    (Mesh.of(dp=1), Options()),
    (Mesh.of(dp=1), Options(microbatches=4)),
    (Mesh.of(ep=2), Options(token_dispatcher="allgather")),
    (Mesh.of(dp=2, ep=2), Options(zero=3, token_dispatcher="alltoall_dedup", microbatches=2)),
    (Mesh.of(cp=2, ep=2), Options(token_dispatcher="alltoall", activation_checkpoint="full", microbatches=2)),
    (Mesh.of(dp=2, cp=2), Options()),
    (Mesh.of(ep=2, tp=2), Options(token_dispatcher="alltoall_dedup", sequence_parallel=True)),
]
CAPACITY = 0.75


def capped(options: Options) -> Options:
    """With a capacity that drops pairs."""
    return replace(options, capacity_factor=CAPACITY)


FULL = [pytest.param(name, marks=pytest.mark.full) for name in ("gpt_oss", "deepseek_v3", "mixtral")]


@pytest.mark.parametrize("name", ["qwen3_moe", *FULL])
def test_a_capped_model_is_the_same_on_every_mesh(name: str) -> None:
    """Biases of experts included, of which a dropped pair has none."""
    model, batch = tiny(name)
    with capped_experts(model, CAPACITY):
        expected = eager(model, batch, SEED)
    assert abs(expected.loss - eager(model, batch, SEED).loss) > 1e-6
    graph = captured_once(model, batch, lift_to_float64=True)
    for mesh, options in MESHES:
        made = compile_graph(copy.deepcopy(graph), mesh, capped(options), outputs=())
        for found in MeshRun(made, model, batch, mesh, SEED).errors(expected):
            assert found.worst < LIMIT, f"{mesh}: {found}"


class Capped(Layer):
    """With experts' numbers as a plain loop over all pairs leaves them."""

    limit = 0

    def forward(self, x: Tensor, expert: Tensor, weights: Tensor) -> Tensor:
        taken = [0] * self.up.shape[0]
        kept = torch.zeros_like(weights)
        for t, row in enumerate(expert.tolist()):
            for k, e in enumerate(row):
                kept[t, k] = taken[e] < self.limit
                taken[e] += 1
        return super().forward(x, expert, weights * kept)


@pytest.mark.parametrize("choice", ["any", "one", "lower half"])
@pytest.mark.parametrize(("dispatch", "microbatches"), [("allgather", 1), ("alltoall", 3), ("alltoall_dedup", 1)])
def test_whoever_is_chosen(choice: str, dispatch: str, microbatches: int) -> None:
    """12 tokens, 24 pairs of 8 experts: 3 pairs each, and all pairs of one expert's where all choose the same."""
    model, batch, mesh = Layer(8), routed(12, 8, 2, choice), Mesh.of(ep=4)
    one = Capped(8)
    one.load_state_dict(model.state_dict())
    one.limit = 3
    expected = eager(one, batch, SEED)
    options = Options(token_dispatcher=dispatch, capacity_factor=1.0, microbatches=microbatches)
    made = compile_graph(capture(model, routed(12, 8, 2, "any"), lift_to_float64=True), mesh, options, outputs=())
    for found in MeshRun(made, model, batch, mesh, SEED).errors(expected):
        assert found.worst < LIMIT, found


def test_the_operator() -> None:
    expert = torch.tensor([[0, 1], [1, 0], [0, 2], [3, 0]])
    kept = torch.ops.autopar.within_capacity(expert, 3, 2)
    assert kept.tolist() == [[0, 1], [1, 0], [3, 2], [3, 3]]


def test_what_is_gathered() -> None:
    """The numbers of experts of all tokens, on each axis that cuts them; nothing of it in the backward."""
    model, batch = Layer(8), routed(16, 8, 2, "any")
    graph, mesh = capture(model, batch, lift_to_float64=True), Mesh.of(ep=4)
    with_it, without = (
        step_communication(compile_graph(copy.deepcopy(graph), mesh, o, outputs=()), 0)
        for o in (Options(token_dispatcher="alltoall", capacity_factor=1.0), Options(token_dispatcher="alltoall"))
    )
    assert ("ep", "all_gather") not in without
    assert with_it["ep", "all_gather"].bytes == 16 * 2 * 8 * 3 // 4


def trained(batch: dict[str, Tensor], steps: int) -> dict[str, Tensor]:
    """Weights after some steps of AdamW."""
    model, _ = tiny("qwen3_moe")
    mesh, options = (
        init_mesh("cpu", 60.0, ep=2),
        {"capacity_factor": CAPACITY, "microbatches": 2, "token_dispatcher": "alltoall_dedup"},
    )
    part, parts = dp_rank_and_size(mesh)
    mine = part_of_batch(batch, dict.fromkeys(batch, 0), parts, part, 2, 2)
    parallel = autopar.parallelize(model, mesh, lift_to_float64=True, example_batch=mine, **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    for _ in range(steps):
        parallel.train_step(**mine)
        optimizer.step()
        optimizer.zero_grad()
    return parallel.full_state_dict()


def test_steps_of_adamw() -> None:
    """Who is dropped changes as routers do; 5 steps on, weights are those of one capped process."""
    model, batch = tiny("qwen3_moe")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with LiftFloat32(), exact_experts(model), capped_experts(model, CAPACITY):
        for _ in range(5):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for found in run_ranks(2, trained, batch, 5):
        for name, x in model.state_dict().items():
            torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-11, msg=name)


def verified(batch: dict[str, Tensor]) -> tuple[bool, float, float]:
    model, _ = tiny("qwen3_moe")
    found = autopar.verify(model, init_mesh("cpu", 60.0, dp=1, ep=2), batch, capacity_factor=CAPACITY)
    plain = autopar.verify(model, init_mesh("cpu", 60.0, dp=1, ep=2), batch)
    return found.passed and plain.passed, found.loss, plain.loss


def test_verify_caps_one_process() -> None:
    for passed, loss, plain in run_ranks(2, verified, tiny("qwen3_moe")[1]):
        assert passed and loss != plain


def test_bad_input() -> None:
    batch: dict[str, Any] = routed(12, 6, 2, "any")
    for options, error in (
        (
            Options(capacity_factor=0.2),
            r"capacity_factor: an expert must take at least one token, found 0.2 times .* use 0.25 or more",
        ),
    ):
        with pytest.raises(ValueError, match=error):
            compile_model(Layer(6), batch, Mesh.of(ep=2), options)
    with pytest.raises(ValueError, match="capacity_factor: needs experts, found"):
        compile_model(nn.Linear(4, 4), {"input": torch.randn(4, 4)}, Mesh.of(dp=2), Options(capacity_factor=1.0))
    with pytest.raises(ValueError, match="capacity_factor: expected a number of at least 0"):
        Options(capacity_factor=-1.0)

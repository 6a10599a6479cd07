"""Bad input to pipelines: a clear error on every rank, before anything is sent."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compile.model import compile_model, plan_model
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.planner import make_plan
from autopar.planner.plan_fits import check_fits
from autopar.runtime.mesh.process_groups import init_mesh
from tests.support.ranks import run_ranks
from tests.support.slices import normalized

LLAMA = TINY["llama"].build(dtype=torch.float64)
BATCH = TINY["llama"].batch(8, 16)

PLANNING: list[tuple[dict[str, Any], str]] = [
    ({"schedule": "2f2b"}, "unknown name '2f2b'; known are gpipe, 1f1b"),
    ({"split_points": ("model.layers.7",)}, "no operation belongs to the split point 'model.layers.7'"),
    ({"split_points": ("model.layers.1", "model.norm")}, "2 split points make 3 stages"),
    (
        {"split_points": ("model.norm", "model.layers.1"), "schedule": "interleaved"},
        "4 stages need 3 split points, found 2",
    ),
    (
        {"split_points": ("model.norm", "model.layers.1", "lm_head"), "schedule": "interleaved"},
        "in the order of the model",
    ),
    ({"split_points": ("model.embed_tokens",)}, "leave a layer in every stage"),
    ({"schedule": "dual_pipe", "microbatches": 2}, "dual_pipe needs"),
    ({"schedule": "1f1b", "virtual_stages": 2}, "1f1b runs 1 parts per rank, found 2"),
    (
        {"schedule": "1f1b", "token_slices": 4},
        "1f1b runs whole microbatches, found token_slices=4; use tera_pipe or seq1f1b",
    ),
    ({"memory_limit": 1000, "schedule": "1f1b", "activation_checkpoint": "none"}, "the least that would do is"),
]


@pytest.mark.parametrize(("options", "message"), PLANNING, ids=[str(o) for o, _ in PLANNING])
def test_refused_when_planning(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^(pipeline|schedule): ") as error:
        plan_model(LLAMA, BATCH, Mesh.of(pp=2), Options(**options))
    assert message in str(error.value)


def test_slices_and_a_sequence_cut_over_ranks_exclude_each_other() -> None:
    """By name, and where slices alone choose the schedule."""
    for options in ({"schedule": "seq1f1b"}, {"token_slices": 2}):
        with pytest.raises(
            ValueError, match='schedule seq1f1b slices the sequence in time, and the axis "cp" shards it over'
        ):
            plan_model(LLAMA, BATCH, Mesh.of(pp=2, cp=2), Options(**options))


def test_a_plan_holds_every_decision() -> None:
    """Parts, schedule and token slices: what is compiled with a plan asks for no more."""
    gm, mesh = normalized(LLAMA, BATCH), Mesh.of(pp=2)
    plan = make_plan(gm, mesh, Options(token_slices=3))
    assert plan.pipeline is not None and (plan.pipeline.schedule, plan.pipeline.token_slices) == ("seq1f1b", (6, 5, 5))
    assert plan.notes[-1] == ("pipeline", "token slices 6, 5, 5: 3 equal slices, as requested")
    evaluation = make_plan(gm, mesh, Options(token_slices=3), plan, train=False)
    assert evaluation.pipeline == plan.pipeline and not evaluation.notes
    example = make_plan(gm, mesh, Options(token_slices=3, microbatches=2, sequence_parallel=False), example=True)
    assert example.pipeline == dataclasses.replace(plan.pipeline, token_slices=()) and example.options.microbatches == 1
    check_fits(plan, gm, train=True)
    check_fits(example, gm)
    with pytest.raises(ValueError, match=r"slices \(\) sum to 0, the sequence has 16 tokens"):
        check_fits(example, gm, train=True)


def test_more_parts_than_operations() -> None:
    with pytest.raises(ValueError, match="512 stages need at least as many layers, found a model of"):
        plan_model(LLAMA, BATCH, Mesh.of(pp=512), Options(schedule="1f1b"))


def test_a_schedule_needs_the_axis() -> None:
    with pytest.raises(ValueError, match="needs a mesh axis pp, found schedule='1f1b' on the mesh dp=2"):
        plan_model(LLAMA, BATCH, Mesh.of(dp=2), Options(schedule="1f1b"))


class Scores(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / 4


class Mix(nn.Module):
    def forward(self, scores: Tensor, v: Tensor) -> Tensor:
        return scores.softmax(-1) @ v


class Attention(nn.Module):
    """Attention in two modules, which become one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.scores, self.mix, self.out = nn.Linear(16, 48), Scores(), Mix(), nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        h = self.mix(self.scores(q, k), v).transpose(1, 2).flatten(2)
        return nn.functional.mse_loss(self.out(h), y)


def test_a_cut_through_an_operation_is_refused() -> None:
    batch = {"x": torch.randn(4, 8, 16), "y": torch.randn(4, 8, 16)}
    with pytest.raises(ValueError, match="no operation belongs to the split point 'scores'"):
        plan_model(Attention(), batch, Mesh.of(pp=2), Options(split_points=("scores",)))
    plan, _ = plan_model(Attention(), batch, Mesh.of(pp=2), Options(split_points=("mix",)))
    assert plan.pipeline is not None and plan.pipeline.split_points == ("mix#1",)


@pytest.mark.parametrize("slices", [(7, 5), (7, 5, 5), (16, 0), 17])
def test_slices_must_sum_to_the_sequence(slices: Any) -> None:
    message = (
        r"^token_slices: .*the sequence has 16 tokens; give positive lengths|^token_slices: .* at least 1, found 0"
    )
    with pytest.raises(ValueError, match=message):
        options = Options(schedule="seq1f1b", token_slices=slices, microbatches=2)
        compile_model(LLAMA, BATCH, Mesh.of(pp=2), options, lift_to_float64=True, outputs=())


@pytest.mark.parametrize("name", ["bert", "vit", "t5"])
def test_models_whose_tokens_see_later_ones_are_not_sliced(name: str) -> None:
    model, batch = TINY[name].build(dtype=torch.float64), TINY[name].batch(4, 16)
    options = Options(schedule="tera_pipe", token_slices=2, microbatches=2)
    with pytest.raises(ValueError, match=r"^token_slices: .*attention"):
        compile_model(model, batch, Mesh.of(pp=2), options, lift_to_float64=True, outputs=())


def refused_on_a_rank(options: dict[str, Any], rows: int) -> list[str]:
    """Errors of parallelize or train_step on a rank, and the bytes it sent before."""
    model, batch = TINY["llama"].build(dtype=torch.float64), TINY["llama"].batch(rows, 16)
    parallel = None
    try:
        parallel = autopar.parallelize(model, init_mesh(pp=2), **options)
        parallel.train_step(**batch)
    except ValueError as error:
        sent = sum(t.bytes for t in parallel.traffic().values()) if parallel is not None else 0
        return [str(error), str(sent)]
    return ["no error", ""]


def test_every_rank_refuses_before_anything_is_sent() -> None:
    for options, rows, message in (
        ({"schedule": "dual_pipe", "microbatches": 2}, 8, "dual_pipe needs"),
        ({"schedule": "1f1b", "microbatches": 3}, 8, "does not divide"),
        ({"schedule": "1f1b", "microbatches": 2}, 7, "does not divide"),
    ):
        for error, sent in run_ranks(2, refused_on_a_rank, options, rows, timeout=120):
            assert message in error, error
            assert sent == "0"

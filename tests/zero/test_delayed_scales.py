"""Scales of products in few bits from earlier steps: the history, the same on every mesh, checkpoints, training."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.ir.graph import calls_of
from autopar.lift_to_float64 import LiftFloat32
from autopar.ops.few_bits.delayed_scales import DelayedScales
from autopar.ops.few_bits.eager_products import ScaledProducts
from autopar.options import Options
from autopar.passes.partition import scale_products
from autopar.precision import PRECISIONS, Precision
from autopar.rewrite.step_checks import StepError
from autopar.runtime.module.argument_checks import check_replicas
from tests.support.ranks import refusal, run_ranks
from tests.support.subjects import make
from tests.zero.test_few_bits import compiled, gathered_bytes, trained

ours = torch.ops.autopar
E4 = torch.float8_e4m3fn
DELAYED = Precision("float64", "float64", "float64", product="float8", scaling="delayed", history=3)
LATEST = dataclasses.replace(DELAYED, amax="most_recent", margin=1)
GATHERED = dataclasses.replace(DELAYED, gather="float8")


# --- the history -----------------------------------------------------------------------------------------------


def found(scales: DelayedScales, magnitudes: list[float]) -> list[float]:
    """The magnitude that each step scales by, in which the operand has one of these."""
    made = []
    for magnitude in magnitudes:
        with scales.used(notes=True):
            scale = ours.delayed_scale(torch.tensor([[magnitude]]), [], "input w", E4)
        made.append(float(scale) * 448)
        scales.advance()
    return made


def test_a_step_scales_by_earlier_ones() -> None:
    assert found(DelayedScales(["w"], 2, "max", 0), [4, 2, 1, 8, 1]) == pytest.approx([4, 4, 4, 2, 8])
    assert found(DelayedScales(["w"], 2, "most_recent", 0), [4, 2, 1, 0, 8]) == pytest.approx([4, 4, 2, 1, 1])
    assert found(DelayedScales(["w"], 2, "max", 1), [4, 2]) == pytest.approx([8, 8])


def test_what_is_not_finite_shows_and_is_not_noted() -> None:
    scales = DelayedScales(["w"], 8, "max", 0)
    made = found(scales, [4, float("inf"), 2])
    assert made[1] == float("inf") and made[2] == pytest.approx(4)
    assert not torch.tensor(found(scales, [float("nan")])).isfinite().any()


def test_evaluations_note_nothing_and_repetitions_change_nothing() -> None:
    scales = DelayedScales(["w"], 8, "max", 0)
    found(scales, [4])
    with scales.used(notes=False):
        ours.delayed_scale(torch.tensor([[9.0]]), [], "input w", E4)
    with scales.used(notes=True):
        for magnitude in (3.0, 6.0, 3.0):
            assert float(ours.delayed_scale(torch.tensor([[magnitude]]), [], "input w", E4)) == pytest.approx(4 / 448)
    scales.advance()
    assert found(scales, [1]) == pytest.approx([6])


def test_a_state_is_read_by_name() -> None:
    before, after = DelayedScales(["v", "w"], 3, "max", 0), DelayedScales(["w", "x"], 2, "max", 0)
    found(before, [4, 2, 1])
    after.set_extra_state(before.get_extra_state())
    assert after.steps == 3 and found(after, [1]) == pytest.approx([2])  # two steps are kept
    other = DelayedScales(["y"], 2, "max", 0)
    other.set_extra_state(before.get_extra_state())
    assert other.steps == 0  # begins with its own magnitudes
    for damaged in (
        {},
        {**before.get_extra_state(), "operands": ["input w"]},
        {**before.get_extra_state(), "steps": -1},
    ):
        with pytest.raises(ValueError, match="expected the magnitudes of operands in few bits"):
            after.set_extra_state(damaged)


# --- the graph -------------------------------------------------------------------------------------------------


def test_a_step_agrees_on_no_scale() -> None:
    """q, k and v share the scale of their operand, gate and up do; weights are scaled again in the backward."""
    step = compiled(make("one-layer llama"), {"dp": 2, "tp": 2}, DELAYED, zero=3)
    assert step.stage.backward_reduce is not None
    graphs = [step.stage.forward.graph, step.stage.backward_reduce.graph]
    nodes = [Counter(str(n.target) for n in gm.graph.nodes) for gm in graphs]
    assert [n["autopar.delayed_scale.default"] for n in nodes] == [4 + 7, 7 + 7]
    magnitudes = [n for gm in graphs for n in calls_of(gm.graph, ours.largest.default)]
    assert {user.target for n in magnitudes for user in n.users} == {ours.delayed_scale.default}


def test_gathers_move_half_the_bytes() -> None:
    layers = 2 * (32 * 32 * 2 + 2 * 16 * 32 + 3 * 32 * 64)
    before, after = (gathered_bytes("dp", {"dp": 2}, gather, "fp8_delayed", zero=3) for gather in ("", "float8"))
    assert before - after == layers * 2 * (2 - 1) // 2


@pytest.mark.parametrize("policy", [GATHERED, dataclasses.replace(GATHERED, scaling="tensor", history=1024)])
def test_gathers_in_eight_bits_are_in_buckets(policy: Precision) -> None:
    """One for a layer's seven weights; of dynamic scales also one exchange of their magnitudes."""
    step = compiled(make("llama"), {"dp": 2}, policy, zero=3)
    assert step.stage.backward_reduce is not None
    for gm in (step.stage.forward.graph, step.stage.backward_reduce.graph):
        gathers = [n for n in calls_of(gm.graph, ours.all_gather.default) if n.meta["val"].dtype == E4]
        assert [n.meta["val"].numel() for n in gathers] == [32 * 32 * 2 + 2 * 16 * 32 + 3 * 32 * 64] * 2
        agreed = [n.meta["val"].numel() for n in calls_of(gm.graph, ours.all_reduce.default) if n.args[2] == "max"]
        assert agreed.count(7) == (0 if policy.scaling == "delayed" else 2)


def test_gathers_in_eight_bits_run_ahead() -> None:
    """Those of the second layer start while the first one computes."""
    gm = compiled(make("llama"), {"dp": 2}, GATHERED, zero=3).stage.forward.graph
    first, second = (n for n in calls_of(gm.graph, ours.all_gather.default) if n.meta["val"].dtype == E4)
    products = calls_of(gm.graph, ours.scaled_mm.default)
    assert first < second < products[0]


def test_rounding_addends_of_a_gradient_is_a_type_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_products, "_pending", lambda *args: ([], [], []))
    with pytest.raises(StepError):
        compiled(make("one-layer llama"), {"tp": 4}, DELAYED)


# --- the same on every mesh ------------------------------------------------------------------------------------

STEPS = 3
RUNS: list[tuple[dict[str, int], dict[str, Any], Precision]] = [
    ({"dp": 2}, {"zero": 3, "microbatches": 2}, GATHERED),
    ({"tp": 2}, {"sequence_parallel": True}, GATHERED),
    ({"pp": 2}, {"schedule": "zb_h1", "microbatches": 2}, LATEST),
]
MORE: list[tuple[dict[str, int], dict[str, Any], Precision]] = [
    ({"dp": 2}, {"zero": 1}, LATEST),
    ({"dp": 2}, {"zero": 2, "microbatches": 2, "backend": "inductor"}, DELAYED),
    ({"cp": 2}, {}, DELAYED),
    ({"tp": 2}, {"sequence_parallel": True, "async_tp": True}, GATHERED),
    ({"tp": 2}, {"activation_checkpoint": "full"}, LATEST),
    ({"pp": 2}, {"schedule": "zb_v", "microbatches": 4}, DELAYED),
    ({"dp": 2}, {"zero": 3, "optimizer_cpu_offload": True, "loss_chunks": 2}, GATHERED),
]


def tuned(loss_of: Any, parameters: Any) -> list[float]:
    """Losses of some steps whose weights grow, so that magnitudes do."""
    optimizer, losses = torch.optim.SGD(parameters, 2.0), []
    for _ in range(STEPS):
        losses.append(float(loss_of().detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def on_a_mesh(sizes: dict[str, int], options: dict[str, Any], policy: Precision, autograd: bool = False) -> list[float]:
    model, batch = make("llama")
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    part = {k: x.chunk(mesh.size(0))[mesh.get_local_rank()] if "dp" in sizes else x for k, x in batch.items()}
    parallel = autopar.parallelize(model, mesh, precision=policy, lift_to_float64=True, example_batch=part, **options)

    def loss() -> Tensor:
        if not autograd:
            return parallel.train_step(**part)
        found: Tensor = parallel(**part).loss
        found.backward()
        return found

    return tuned(loss, parallel.parameters())


def alone(policy: Precision, count: int = 1, ranks: int = 1) -> list[float]:
    """In one process. ``count``, ``ranks``: microbatches, which scale by themselves in the first step, of so many
    ranks."""
    model, batch = make("llama")
    weights = [name for name, why in compiled((model, batch), {"dp": 1}, policy).plan.products.items() if not why]
    scales = DelayedScales(weights, policy.history, policy.amax, policy.margin, torch.float64)
    rows = torch.arange(len(batch["input_ids"])).view(ranks, count, -1).unbind(1)
    of_each = [x.reshape(-1) for x in rows] if count > 1 else []

    def loss() -> Tensor:
        with LiftFloat32(), ScaledProducts(model, weights, "delayed", microbatches=of_each, delayed=scales):
            found: Tensor = model(**batch).loss
            found.backward()
        scales.advance()
        return found

    return tuned(loss, model.parameters())


@pytest.mark.parametrize("runs", [RUNS, *(pytest.param([run], marks=pytest.mark.full) for run in MORE)])
def test_steps_equal_one_process(runs: list[tuple[dict[str, int], dict[str, Any], Precision]]) -> None:
    for losses, (sizes, options, policy) in zip(run_ranks(2, of_runs, runs, timeout=240)[0], runs, strict=True):
        expected = alone(policy, options.get("microbatches", 1), sizes.get("dp", 1))
        assert losses == pytest.approx(expected, rel=1e-10), (sizes, options)
        assert len(set(losses)) == STEPS


def of_runs(runs: list[tuple[dict[str, int], dict[str, Any], Precision]]) -> list[list[float]]:
    return [on_a_mesh(*run) for run in runs]


# --- a run that goes on ----------------------------------------------------------------------------------------


def test_a_run_goes_on_from_a_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    went_on, loaded, anew = run_ranks(2, resumed, str(tmp_path), timeout=120)[0]
    assert loaded == pytest.approx(went_on, rel=1e-10)
    assert abs(anew / went_on - 1) > 1e-9, "without its history it has other scales"


def resumed(folder: str) -> tuple[float, float, float]:
    """The loss of the step after two: of the run, of one loaded on another mesh, and of one with its weights alone."""
    model, batch = make("llama")
    how: dict[str, Any] = {"precision": DELAYED, "lift_to_float64": True}
    pieces = autopar.init_mesh("cpu", 60.0, dp=2)
    part = {k: x.chunk(2)[pieces.get_local_rank()] for k, x in batch.items()}
    first = autopar.parallelize(model, pieces, zero=3, example_batch=part, **how)
    optimizer = torch.optim.SGD(first.parameters(), 2.0)
    for _ in range(2):
        first.train_step(**part)
        optimizer.step()
        optimizer.zero_grad()
    autopar.save(folder, first)
    weights = first.full_state_dict()
    went_on = float(first.train_step(**part))
    whole = autopar.init_mesh("cpu", 60.0, tp=2)
    other, fresh = (autopar.parallelize(make("llama")[0], whole, example_batch=batch, **how) for _ in range(2))
    autopar.load(folder, other)
    fresh.load_state_dict(weights)
    return went_on, float(other.train_step(**batch)), float(fresh.train_step(**batch))


def test_backward_of_autograd_is_a_step_and_an_evaluation_is_none() -> None:
    trained_steps, by_autograd, evaluated = run_ranks(1, both_ways, timeout=120)[0]
    assert trained_steps == by_autograd
    assert evaluated == pytest.approx(trained_steps[-1], rel=1e-12)


def both_ways() -> tuple[list[float], list[float], float]:
    model, batch = make("llama")
    made = [on_a_mesh({"dp": 1}, {}, LATEST, autograd) for autograd in (False, True)]
    mesh = autopar.init_mesh("cpu", 60.0, dp=1)
    parallel = autopar.parallelize(model, mesh, precision=LATEST, lift_to_float64=True, example_batch=batch)
    optimizer = torch.optim.SGD(parallel.parameters(), 2.0)
    for _ in range(STEPS - 1):
        parallel.eval()
        parallel(**batch)
        parallel.train()
        parallel.train_step(**batch)
        optimizer.step()
        optimizer.zero_grad()
    parallel.eval()
    return *made, float(parallel(**batch).loss)  # type: ignore[return-value]


# --- what is refused, and training -----------------------------------------------------------------------------


def test_recorded_steps_and_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match=r"replicas: .* found precision='fp8_delayed'"):
        check_replicas(Options(replicas=2, precision=PRECISIONS["fp8_delayed"]), "eager", "exact", ())
    assert "a recorded step would repeat the scales of its first run" in run_ranks(1, recorded, timeout=60)[0]


def recorded() -> str:
    mesh = autopar.init_mesh("cpu", 60.0, dp=1)
    how: dict[str, Any] = {"precision": "fp8_delayed", "backend": "cudagraphs"}
    return refusal(lambda: autopar.parallelize(make("llama")[0].float(), mesh, **how))


@pytest.mark.parametrize(
    "given, says",
    [
        ({"scaling": "tensor", "history": 16}, "history, amax and margin are those of delayed scales"),
        ({"history": 0}, "precision.history: expected a whole number of at least 1"),
        ({"amax": "mean"}, "precision.amax: expected one of 'max', 'most_recent'"),
        ({"margin": -1}, "precision.margin: expected a whole number of at least 0"),
    ],
)
def test_policies_that_cannot_be_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(DELAYED, **given)


@pytest.mark.parametrize("steps", [20, pytest.param(200, marks=pytest.mark.full)])
def test_the_loss_is_within_a_percent_of_that_in_bfloat16(steps: int) -> None:
    means = run_ranks(1, trained, make, ("bf16", "fp8_delayed"), 16, 16, steps, timeout=120)[0]
    assert means["bf16"] < 4.1, "it learns"
    assert means["fp8_delayed"] != means["bf16"]
    assert abs(means["fp8_delayed"] / means["bf16"] - 1) < 0.01, means

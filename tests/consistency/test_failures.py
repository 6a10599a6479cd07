"""Bad input is refused on every rank before any collective; a rank that fails is named by the others' errors."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import Plan
from autopar.models.tiny import TINY
from autopar.runtime.fault import errors as failures
from autopar.runtime.fault.heartbeat import BEAT
from autopar.runtime.mesh.process_groups import Groups
from tests.support.meeting import meet_for
from tests.support.ranks import Outcome, close_pools, rank_outcomes, refusal, run_ranks
from tests.support.subjects import tiny

TIMEOUT = 6.0  # seconds until a collective without its peers fails


class Net(nn.Module):
    """As many heads of attention as you like, in plain matmuls."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, width), nn.Linear(width, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.head(torch.relu(self.first(x))), target)


class WithKthValue(Net):
    """An operator without a rule, on a value that dp cuts."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        value, _ = torch.kthvalue(self.first(x), 2, dim=0)
        return nn.functional.mse_loss(self.head(value).expand(target.shape), target)


class WithMedian(Net):
    """One of which no dim can be cut, so that none is derived."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.first(x)
        far = torch.nanmedian(h)
        return nn.functional.mse_loss(self.head(h), target) + far


class Branching(Net):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.first(x)
        if h.sum() > 0:  # the line that the error must name
            h = -h
        return nn.functional.mse_loss(self.head(h), target)


class Contrastive(Net):
    """Samples meet: a microbatch is not a piece of it."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.first(x)
        return nn.functional.cross_entropy(h @ h.transpose(0, 1), target.argmax(1))


def build(kind: type[Net], *args: Any) -> Net:
    torch.manual_seed(0)
    return kind(*args).double()


def batch_of(rows: int) -> dict[str, Tensor]:
    """One rank's part."""
    g = torch.Generator().manual_seed(0)
    return {"x": torch.randn(rows, 8, generator=g, dtype=torch.float64),
            "target": torch.randn(rows, 4, generator=g, dtype=torch.float64)}  # fmt: skip


def step(kind: type[Net], rows: int, sizes: dict[str, int], options: dict[str, Any], width: int = 12) -> float:
    mesh = autopar.init_mesh("cpu", TIMEOUT, **sizes)
    model = build(kind, width)
    parallel = autopar.parallelize(model, mesh, example_batch=batch_of(rows), **options)
    return float(parallel.train_step(**batch_of(rows)))


def llama_step(sizes: dict[str, int], seq: int, options: dict[str, Any]) -> float:
    mesh = autopar.init_mesh("cpu", TIMEOUT, **sizes)
    parallel = autopar.parallelize(tiny("llama", layers=1)[0], mesh, lift_to_float64=True, **options)
    return float(parallel.train_step(**TINY["llama"].batch(2, seq)))


def refused(ranks: int, pattern: str, fn: Any, *args: Any) -> None:
    """Every rank says the same, and the pool still works afterwards: nobody waits in a collective."""
    texts = run_ranks(ranks, refusal, fn, *args)
    assert len(set(texts)) == 1, texts
    assert re.search(pattern, texts[0]), texts[0]


def step_named(name: str, *args: Any) -> Any:
    return step(CASES[name], *args)


CASES: dict[str, type[Net]] = {c.__name__: c for c in (Net, WithKthValue, WithMedian, Branching, Contrastive)}

# --- sizes --------------------------------------------------------------------------------------------


def test_a_batch_that_does_not_divide_over_microbatches() -> None:
    pattern = "batch of 6 .*does not divide into 4 pieces.*use a batch of 8"
    refused(2, pattern, step_named, "Net", 3, {"dp": 2}, {"microbatches": 2})


# --- meshes and options -------------------------------------------------------------------------------


def mesh_of(sizes: dict[str, int]) -> None:
    autopar.init_mesh("cpu", TIMEOUT, **sizes)


def test_unknown_axes_and_meshes_larger_than_the_world() -> None:
    refused(2, "unknown axis 'data'; the axes are pp, dp_replicate, dp, cp, ep, tp", mesh_of, {"data": 2})
    refused(2, "needs 8 ranks, the world has 2", mesh_of, {"dp": 4, "tp": 2})
    refused(2, "needs 1 ranks, the world has 2", mesh_of, {})
    refused(2, "size of at least 1, found 0", mesh_of, {"dp": 0})


def test_unknown_options() -> None:
    refused(2, "unknown option 'zeroo'; the options are .*zero", step_named, "Net", 2, {"dp": 2}, {"zeroo": 3})
    refused(2, "zero: expected 0, 1, 2 or 3, found 7", step_named, "Net", 2, {"dp": 2}, {"zero": 7})
    pattern = "microbatches: expected a whole number of at least 1, found 0"
    refused(2, pattern, step_named, "Net", 2, {"dp": 2}, {"microbatches": 0})
    pattern = "backend: expected 'eager', 'inductor', 'cudagraphs' or 'inductor.cudagraphs', found 'fast'"
    refused(2, pattern, step_named, "Net", 2, {"dp": 2}, {"backend": "fast"})


# --- models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, op", [("WithKthValue", "aten.kthvalue.default"), ("WithMedian", "aten.nanmedian.default")]
)
def test_an_operator_without_a_rule(name: str, op: str) -> None:
    refused(2, rf"no sharding rule for {op}.*replicate_ops=\('{op}',\)", step_named, name, 8, {"dp": 2}, {})


def whole(name: str, op: str) -> tuple[float, float]:
    mesh = autopar.init_mesh("cpu", TIMEOUT, dp=2)
    model, everything = build(CASES[name], 6), batch_of(16)
    part = {k: v.chunk(2)[dist.get_rank()] for k, v in everything.items()}
    parallel = autopar.parallelize(model, mesh, example_batch=part, replicate_ops=(op,))
    loss = parallel.train_step(**part)
    expected = model(**everything)
    expected.backward()
    full = parallel.full_gradients()
    worst = max(float((full[n] - p.grad).abs().max()) for n, p in model.named_parameters())
    return abs(float(loss) - float(expected)), worst


@pytest.mark.parametrize(
    "name, op", [("WithKthValue", "aten.kthvalue.default"), ("WithMedian", "aten.nanmedian.default")]
)
def test_replicate_ops_lets_it_run(name: str, op: str) -> None:
    for loss, gradient in run_ranks(2, whole, name, op):
        assert loss < 1e-10 and gradient < 1e-10


def test_a_model_that_does_not_export() -> None:
    refused(
        2, r"capture: torch.export stopped at .*test_failures.py:\d+ in forward, `if h.sum\(\) > 0:.*torch.where",
        step_named, "Branching", 2, {"dp": 2}, {},
    )  # fmt: skip


def test_samples_that_meet_across_microbatches() -> None:
    refused(2, "microbatches: samples of different microbatches meet at .*microbatches=1",
            step_named, "Contrastive", 4, {"dp": 2}, {"microbatches": 2})  # fmt: skip


def without_labels() -> None:
    mesh = autopar.init_mesh("cpu", TIMEOUT, dp=2)
    parallel = autopar.parallelize(TINY["llama"].build(), mesh, lift_to_float64=True)
    batch = TINY["llama"].batch(2, 8)
    batch.pop("labels")
    parallel.train_step(**batch)


def test_a_step_without_a_loss() -> None:
    refused(2, "needs a scalar output with a gradient.*labels", without_labels)


# --- ranks that differ --------------------------------------------------------------------------------


def other_shapes(same_shape: bool) -> str:
    mesh = autopar.init_mesh("cpu", TIMEOUT, dp=2)
    parallel = autopar.parallelize(build(Net), mesh, example_batch=batch_of(4))
    parallel.train_step(**batch_of(4))
    rows = 4 if same_shape else 4 + 2 * dist.get_rank()
    try:
        parallel.train_step(**batch_of(rows))
    except ValueError as error:
        return str(error)
    return "no error"


def test_batches_of_different_shapes_are_refused_on_every_rank() -> None:
    texts = run_ranks(2, other_shapes, False)
    assert len(set(texts)) == 1
    assert re.search(r"shapes of the batch must be the same on all ranks.*rank 1: .*6, 8", texts[0]), texts[0]
    assert run_ranks(2, other_shapes, True) == ["no error"] * 2


def other_options() -> None:
    step(Net, 4, {"dp": 2}, {"zero": 3 * dist.get_rank()})


def test_options_that_differ_between_ranks() -> None:
    refused(2, "must be given the same options, found zero: rank 1: 3; against rank 0: 0; call it alike", other_options)


# --- plans --------------------------------------------------------------------------------------------


def plan_of(kind: type[Net], sizes: dict[str, int], width: int) -> str:
    mesh = autopar.init_mesh("cpu", TIMEOUT, **sizes)
    return autopar.parallelize(build(kind, width), mesh, example_batch=batch_of(4)).plan.to_json()


def with_plan(text: str, sizes: dict[str, int]) -> float:
    mesh = autopar.init_mesh("cpu", TIMEOUT, **sizes)
    plan = Plan.from_json(text)
    parallel = autopar.parallelize(build(Net), mesh, example_batch=batch_of(4), plan=plan)
    return float(parallel.train_step(**batch_of(4)))


def test_plans_belong_to_a_model_and_a_mesh() -> None:
    other_model = run_ranks(2, plan_of, Net, {"tp": 2}, 16)[0]
    other_mesh = run_ranks(2, plan_of, Net, {"dp": 2}, 12)[0]
    right = run_ranks(2, plan_of, Net, {"tp": 2}, 12)[0]
    refused(2, "plan: made for a graph with parameters .*make a new plan", with_plan, other_model, {"tp": 2})
    refused(2, "plan: made for the mesh dp=2, this one is tp=2; make a new plan", with_plan, other_mesh, {"tp": 2})
    refused(2, "plan: expected the JSON of a plan", with_plan, "{}", {"tp": 2})
    assert len({round(x, 12) for x in run_ranks(2, with_plan, right, {"tp": 2})}) == 1


# --- ranks that fail ----------------------------------------------------------------------------------


def fail_in_step(how: str, victim: int) -> str:
    """Two good steps; in the third one rank is killed, raises or stalls. The others say what they see, and when."""
    mesh = autopar.init_mesh("cpu", TIMEOUT, dp=dist.get_world_size())
    parallel = autopar.parallelize(build(Net), mesh, example_batch=batch_of(4), zero=3)
    for _ in range(2):
        parallel.train_step(**batch_of(4))
    executor = parallel._cache.runners[0]
    instruction = executor.program.entries[-1].instructions[0]
    backward = instruction.apply

    def failing(inputs: list[Any]) -> Any:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise KeyError("boom")
        time.sleep(TIMEOUT + 4)
        return backward(inputs)

    if dist.get_rank() == victim:
        instruction.apply = failing
    start = time.monotonic()
    try:
        parallel.train_step(**batch_of(4))
    except KeyError:
        raise
    except Exception as error:
        return f"{time.monotonic() - start:.1f} {type(error).__name__}: {error}"
    return "no error"


def survivors(how: str, victim: int, ranks: int = 2) -> tuple[list[Outcome], list[tuple[float, str]]]:
    close_pools()
    outcomes = rank_outcomes(ranks, fail_in_step, how, victim, timeout=60, grace=TIMEOUT + 5)
    close_pools()  # all ranks may have caught their error: the groups are broken all the same
    others = [o for o in outcomes if o.rank != victim]
    assert all(o.ok for o in others), [o.error or o.lost for o in others]
    found = [o.value.partition(" ")[::2] for o in others]
    return outcomes, [(float(seconds), text) for seconds, text in found]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named(victim: int) -> None:
    outcomes, others = survivors("killed", victim)
    assert "exit code -9" in (outcomes[victim].lost or "")
    for seconds, text in others:
        assert f"rank {victim} did not respond" in text and 'axis "dp"' in text, text
        assert seconds < TIMEOUT + 5


def test_the_error_of_a_rank_reaches_the_others() -> None:
    outcomes, others = survivors("raises", 1)
    assert "boom" in (outcomes[1].error or "")
    for seconds, text in others:
        assert "rank 1 failed: KeyError: 'boom'" in text, text
        assert seconds < TIMEOUT + 5


def test_a_rank_that_stalls_is_named_within_the_timeout() -> None:
    _, others = survivors("stalls", 1)
    for seconds, text in others:
        assert "rank 1 did not respond: alive, but never joined" in text, text
        assert TIMEOUT - 2 < seconds < TIMEOUT + 5


def refused_and_gone_on() -> str:
    """All ranks are refused the same; one of them is late for the next call, and still says why."""
    groups = Groups(autopar.init_mesh("cpu", 30.0, dp=2))
    with pytest.raises(ValueError), failures.error_context("a call"):
        raise ValueError("refused everywhere")
    if dist.get_rank() == 1:
        time.sleep(1.6 * BEAT)
    with failures.error_context("the next call"):
        meet_for(groups, "the next call")
    return "agreed"


def test_a_refusal_that_all_ranks_have_had_is_no_failure_of_a_late_one() -> None:
    assert run_ranks(2, refused_and_gone_on) == ["agreed"] * 2


# --- processes of ranks --------------------------------------------------------------------------------


def end_in_a_child() -> float:
    """Seconds that a process forked by a rank takes to leave."""
    autopar.init_mesh(dp=2)
    start, child = time.monotonic(), os.fork()
    if child == 0:
        failures.close()  # as at exit: its parent's threads, which would answer, have not come along
        os._exit(0)
    os.waitpid(child, 0)
    return time.monotonic() - start


def test_a_process_that_a_rank_has_forked_is_no_rank() -> None:
    assert max(run_ranks(2, end_in_a_child)) < 4
    assert len(run_ranks(2, mesh_of, {"dp": 2})) == 2, "the ranks are as they were"

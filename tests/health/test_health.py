"""How ranks spend their time: by a clock of the test, and on real ranks of which one is slowed."""

from __future__ import annotations

import time
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.report.html.health_section import health_sections, time_bars
from autopar.runtime.comm.wait_times import Record, recording, waiting
from autopar.runtime.exec.instructions import BoundAction
from autopar.runtime.health import health_watch
from autopar.runtime.health.slow_ranks import Health, compare
from autopar.runtime.health.step_times import EARLY, WARM_UP, Calls, RankTimes, StepTimes
from tests.support.ranks import run_ranks

# --- a rank's own times ---------------------------------------------------------------------------------


def test_waits_are_told_from_computing() -> None:
    with recording(torch.device("cpu")) as record:
        time.sleep(0.03)
        for axis in ("tp", "dp", "tp"):
            with waiting(axis):
                time.sleep(0.01)
    spent = record.spent()
    assert spent is not None and spent.waited.keys() == {"tp", "dp"}
    assert spent.waited["tp"] > 0.019 > spent.waited["dp"] > 0.009 and 0.029 < spent.computing < spent.seconds - 0.029


def test_waits_outside_of_a_step_are_not_noted() -> None:
    with waiting("tp"):
        pass
    with recording(torch.device("cpu")) as record, pytest.raises(RuntimeError), waiting("tp"):
        raise RuntimeError("a rank has died")
    assert len(record.waits) == 1 and record.spent() is not None


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def run(self, times: StepTimes, kind: str, seconds: float, waited: float) -> None:
        start, self.now = self.now, self.now + seconds
        times.add(kind, Record(self, start, self.now, [("dp", start, start + waited)]))


def test_the_last_minute_counts() -> None:
    clock = Clock()
    times = StepTimes(clock)
    for _ in range(WARM_UP):
        clock.run(times, "1 step", 30.0, 0.0)  # compiling
    assert times.last_minute(0, {}, "a").calls == 0
    for _ in range(EARLY):
        clock.run(times, "1 step", 4.0, 1.0)
        clock.now += 1.0
    for _ in range(12):
        clock.run(times, "1 step", 4.5, 0.5)
        clock.now += 0.5
    found = times.last_minute(3, {"dp": 1}, "a")
    assert found.calls == 12 and found.kinds == {"1 step": Calls(12, 4.0, 3.0)}
    assert (
        found.waiting == {"dp": 6.0}
        and found.computing == 48.0
        and found.spent()["outside of steps"] == pytest.approx(5.5)
    )
    assert RankTimes.from_text(found.text()) == found


# --- ranks compared -------------------------------------------------------------------------------------


def ranks(*computing: float, pp: int = 1, early: float | None = None) -> list[RankTimes]:
    kinds = [{"1 step": Calls(50, x, early)} for x in computing]
    each = len(computing) // pp
    return [
        RankTimes(i, {"pp": i // each}, "node", 50, 60.0, 50 * x, {}, k)
        for (i, x), k in zip(enumerate(computing), kinds)
    ]


def test_a_rank_is_compared_with_others_of_its_stage() -> None:
    found = Health(ranks(1.0, 1.15, 0.99, 2.0, 2.01, 2.3, pp=2))
    assert found.slow.keys() == {1, 5}
    assert str(found.slow[5]) == "computes 15% longer than ranks 3, 4"
    assert "rank 1 (pp=0, node): 50 steps, computing 96%" in str(found) and str(found).count("SLOW") == 2


def test_a_rank_alone_in_its_stage_is_compared_with_itself() -> None:
    assert Health(ranks(1.0, 3.0, pp=2)).slow == {}
    assert Health(ranks(1.0, 1.2, pp=2, early=1.05)).slow.keys() == {1}
    assert str(Health(ranks(1.2, pp=1, early=1.0)).slow[0]) == "computes 20% longer than in its own first steps"


def test_the_report_draws_a_bar_for_each_rank() -> None:
    picture = time_bars(Health([*ranks(1.0, 1.2, 0.99), RankTimes(3, {}, "node")]).rows())
    root = ElementTree.fromstring(picture)
    bars = [x for x in root.iter("{http://www.w3.org/2000/svg}rect") if x.get("class") == "edge"]
    assert len(bars) == 4 and "rank 1 (pp=0, node): computing 60.0 s, 100%" in picture and "21% longer" in picture
    assert health_sections(Health([RankTimes(0, {}, "node")]).rows()) == []


def test_only_kinds_that_both_have_run_are_compared() -> None:
    def of(rank: int, **kinds: Calls) -> RankTimes:
        return RankTimes(rank, {}, "node", 20, 60.0, 1.0, {}, kinds)

    train, other = Calls(30, 1.0, None), Calls(30, 9.0, None)
    assert compare(of(0, train=train, eval=other), [of(1, train=train)]).longer == 0.0  # type: ignore[union-attr]
    assert compare(of(0, eval=other), [of(1, train=train)]) is None
    assert compare(of(0, train=Calls(3, 9.0, None)), [of(1, train=train)]) is None


def test_the_first_rank_warns_once_of_a_rank_that_is_slow_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = object.__new__(health_watch.HealthWatch)
    watch._warned = set()
    slow, short = Health(ranks(1.0, 1.0, 1.2)), ranks(1.0, 1.0, 1.2)
    short[2] = RankTimes(2, {"pp": 0}, "node", 50, 10.0, 9.0, {}, short[2].kinds)
    told: list[str] = []
    monkeypatch.setattr(health_watch.log, "warning", lambda text, *args: told.append(text % args))
    for health in (Health(short), slow, slow, Health(ranks(1.0, 1.0, 1.0)), slow):
        watch._warn(health)
    assert told == ["health: rank 2 (node) computes 20% longer than ranks 0, 1, for a minute"] * 2


# --- real ranks -----------------------------------------------------------------------------------------


def with_a_slow_rank(sizes: dict[str, int], slow: int, by_backward: bool) -> Health:
    """As this rank reads it."""
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    torch.manual_seed(0)
    model = Small()
    batch = {"x": torch.rand(4, 8)}
    parallel = autopar.parallelize(model, mesh, example_batch=batch, microbatches=1)
    health_watch.EVERY = 0.2
    run, pause = BoundAction.run, 0.025 * (1.15 if dist.get_rank() == slow else 1.0)

    def slowed(self: BoundAction, *args: Any) -> float:
        time.sleep(pause)
        return run(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundAction, "run", slowed)
        for _ in range(40):
            if by_backward:
                parallel(**batch).backward()
            else:
                parallel.train_step(**batch)
    dist.barrier()
    time.sleep(2.5)  # two heartbeats
    health = parallel.health()
    dist.barrier()
    return health


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).pow(2).mean()


@pytest.mark.parametrize(
    ("sizes", "slow", "by_backward"),
    [({"dp": 4}, 2, False), ({"dp": 2, "tp": 2}, 3, True), ({"pp": 2, "dp": 2}, 1, False)],
)
def test_a_slowed_rank_is_named_and_nobody_else(sizes: dict[str, int], slow: int, by_backward: bool) -> None:
    for health in run_ranks(4, with_a_slow_rank, sizes, slow, by_backward, timeout=120):
        assert [*health.slow] == [slow] and 0.10 < health.slow[slow].longer < 0.25, str(health)
        assert all(one.waiting.keys() == sizes.keys() for one in health.ranks), str(health)
        assert health.slow[slow].others and slow not in health.slow[slow].others


@pytest.mark.full
@pytest.mark.parametrize("turn", range(20))
def test_a_slowed_rank_is_named_every_time(turn: int) -> None:
    test_a_slowed_rank_is_named_and_nobody_else({"dp": 2, "tp": 2}, turn % 4, bool(turn % 2))


def ask_compiled(backend: str) -> None:
    mesh = autopar.init_mesh("cpu", dp=1)
    batch = {"x": torch.rand(4, 8)}
    parallel = autopar.parallelize(Small(), mesh, example_batch=batch, backend=backend)
    with pytest.raises(ValueError, match=rf"health: waiting is seen .* found backend='{backend}'"):
        parallel.health()


@pytest.mark.parametrize("backend", ["cudagraphs", "inductor"])
def test_a_backend_that_hides_its_waits_is_refused(backend: str) -> None:
    run_ranks(1, ask_compiled, backend)

"""The pool itself: results in order, failures named, recovery after a failure, no leftover processes."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar import api
from autopar.cache.compile_cache import stored_step
from autopar.cache.disk_cache import DiskCache
from autopar.cache.own_sources import changed_autopar
from autopar.cache.step_codec import StoredStep
from autopar.ir.mesh import Mesh
from autopar.options import Options
from tests.support.compile_cache import by_one, compiled_by_each, sections_of_step, step_of
from tests.support.cpu_slots import LONG, OF_LOOP, OF_RANK, loops, set_turn, turn, usual_turns
from tests.support.launched import in_child
from tests.support.plain_models import Metric, Net, Tied, build, numbers, part, put, tokens
from tests.support.ranks import RankError, close_pools, rank_outcomes, run_ranks


def total(x: torch.Tensor) -> tuple[int, torch.Tensor]:
    y = x * (dist.get_rank() + 1)
    dist.all_reduce(y)
    return dist.get_rank(), y


def pid() -> int:
    return os.getpid()


def draw() -> float:
    return torch.rand(1).item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("boom")
    dist.barrier()


def die_on(rank: int) -> str:
    if dist.get_rank() == rank:
        os._exit(7)
    return "alive"


def compute(seconds: float) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return "done"


def stall_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


@pytest.mark.parametrize("n", [2, 4])
def test_results_come_in_rank_order(n: int, ranks: Callable[..., list[Any]]) -> None:
    out = ranks(n, total, torch.ones(3))
    assert [rank for rank, _ in out] == list(range(n))
    assert all(torch.equal(y, torch.full((3,), n * (n + 1) / 2)) for _, y in out)


def test_the_pool_is_reused_and_seeded() -> None:
    assert run_ranks(2, pid) == run_ranks(2, pid)
    assert len({*run_ranks(2, draw), *run_ranks(2, draw)}) == 1


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_ranks_without_work_are_suspended() -> None:
    ranks = run_ranks(2, pid)
    end = time.monotonic() + 10
    while {state_of(x) for x in ranks} != {"T"}:
        assert time.monotonic() < end
    assert [y for _, y in run_ranks(2, total, torch.ones(()))] == [3.0, 3.0]


def turns() -> tuple[float, bool, float, float, int]:
    before = turn()
    may_choose = True
    try:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except (AttributeError, OSError):  # no Linux; a container that forbids it
        may_choose = False
    os.nice(3)
    taken = set_turn(LONG)
    assert taken == (may_choose and platform.machine() in ("x86_64", "aarch64"))
    return before, taken, turn(), in_child(turn), os.nice(0)


def turns_of_rank() -> tuple[float, set[float], set[float]]:
    with usual_turns():
        usual = {turn(thread) for thread in (0, *loops())}
    return turn(), {turn(thread) for thread in loops()}, usual


def test_turns_on_a_core_are_long_for_who_computes_and_short_for_who_waits() -> None:
    version = tuple(map(int, platform.release().split("-")[0].split(".")[:2])) if platform.system() == "Linux" else ()
    before, taken, mine, forked, nice = in_child(turns)
    can_choose = taken and version >= (6, 12)  # before, Linux takes it and does nothing
    assert forked == before < LONG and nice == os.nice(0) + 3
    assert (mine == LONG) == can_choose
    for rank, threads, usual in run_ranks(2, turns_of_rank):
        assert usual == {before}
        assert (rank == OF_RANK) == can_choose and (threads == {OF_LOOP}) == can_choose


def test_a_failing_rank_is_named_and_the_pool_restarts() -> None:
    before = run_ranks(2, pid)
    with pytest.raises(RankError, match=r"(?s)rank 1 raised.*KeyError: 'boom'"):
        run_ranks(2, fail_on, 1)
    assert run_ranks(2, pid) != before


def test_a_dead_and_a_stuck_rank_are_named() -> None:
    outcomes = rank_outcomes(2, die_on, 1)
    assert outcomes[0].value == "alive" and outcomes[1].lost == "died with exit code 7"
    with pytest.raises(RankError, match=r"(?s)rank 0 was still running after 1 s.*stall_on"):
        run_ranks(2, stall_on, 0, timeout=1)


def test_ranks_that_compute_get_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.ranks.LOOK", 1.0)
    monkeypatch.setattr("tests.support.ranks.IDLE", 0.05)
    assert run_ranks(1, compute, 2.0, timeout=1.5) == ["done"]
    with pytest.raises(
        RankError, match=r"(?s)rank 0 was still running after \d+ s, in which the ranks computed.*compute"
    ):
        run_ranks(1, compute, 30.0, timeout=0.5)


def what_is_read(alone: bool) -> list[bool]:
    """Of the steps of two models, one after the other, which were compiled by another rank."""
    found = []
    for kind, batch in ((Net, numbers()), (Tied, tokens())):
        with compiled_by_each() if alone else nullcontext():
            module = put(build(kind), batch, {"dp": 2})
            module.train_step(**part(batch, {"dp": 2}))
        found += [isinstance(made, StoredStep) for made in module.compiled()]
    return found


def test_one_of_two_ranks_compiles() -> None:
    first, second = run_ranks(2, what_is_read, False)
    assert [a != b for a, b in zip(first, second, strict=True)] == [True, True]
    assert run_ranks(2, what_is_read, True) == [[False, False]] * 2


def test_a_rank_compiles_what_no_other_was_asked_for(tmp_path: Path) -> None:
    step = partial(by_one, stored_step, sections_of_step, step_of, DiskCache(tmp_path))
    first, second, batch = step(0, count()), step(1, count()), numbers()

    def read(ask: Callable[..., Any], options: Options, kind: type = Net) -> bool:
        return isinstance(ask(build(kind), batch, Mesh.of(dp=2), options, outputs=()), StoredStep)

    assert [read(first, Options()), read(second, Options())] == [False, True]
    assert [read(first, Options()), read(second, Options(zero=3))] == [False, False]
    assert [read(first, Options()), read(second, Options(), Metric)] == [False, False]
    assert [read(first, Options(zero=3)), read(second, Options(zero=3))] == [False, True]
    assert [read(first, Options()), read(first, Options(zero=1)), read(second, Options(zero=1))] == [False] * 3


def seen_by_a_rank() -> str | None:
    return changed_autopar()


def test_ranks_inherit_nothing_that_a_test_has_put_into_autopar(monkeypatch: pytest.MonkeyPatch) -> None:
    close_pools()
    with monkeypatch.context() as patched:
        patched.setattr(api, "load_adapters", seen_by_a_rank)
        assert run_ranks(1, seen_by_a_rank) == ["autopar.api.load_adapters"]
    assert run_ranks(1, seen_by_a_rank) == [None]

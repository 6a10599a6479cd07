"""The pool itself: results in order, failures named, recovery after a failure, no leftover processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, rank_outcomes, run_ranks


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
    monkeypatch.setattr("tests.ranks.LOOK", 1.0)
    monkeypatch.setattr("tests.ranks.IDLE", 0.05)
    assert run_ranks(2, compute, 2.0, timeout=1.5) == ["done", "done"]
    with pytest.raises(
        RankError, match=r"(?s)rank 0 was still running after \d+ s, in which the ranks computed.*compute"
    ):
        run_ranks(2, compute, 30.0, timeout=0.5)

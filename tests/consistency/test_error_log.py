"""Each rank looks at a few others, and all hear of what any has found."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.adapters.distributed import own_client
from autopar.runtime.fault import error_propagation
from autopar.runtime.fault.error_propagation import MOST, ErrorBoard, ErrorLog
from autopar.runtime.fault.errors import CollectiveError, error_context
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from tests.consistency.test_hangs import LONG, SOON, World
from tests.runtime.test_groups import Counting
from tests.support.meeting import meet_for


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_notices_are_few_and_those_of_whoever_comes_first(store: dist.Store) -> None:
    notices = ErrorLog("x")
    assert notices.read(store) == {}
    for rank in range(MOST + 3):
        notices.tell(store, "error", rank, f"KeyError: '{rank}'\nmore")
    notices.tell(store, "left", 40, "")
    notices.tell(store, "left", 40, "")
    found = notices.read(store)
    assert list(found["error"]) == list(range(MOST)) and found["error"][2] == "KeyError: '2'\nmore"
    assert found["left"] == {40: ""} and found["heard"] == {}
    notices.take_back(store, "error", 2, "KeyError: '2'\nmore")
    notices.take_back(store, "error", MOST + 1, f"KeyError: '{MOST + 1}'\nmore")  # which is not there
    notices.tell(store, "error", 99, "late")
    assert list(notices.read(store)["error"]) == [r for r in range(MOST) if r != 2] + [99]


def test_notices_of_many_at_the_same_moment(store: dist.Store) -> None:
    """Nothing is lost, and nothing is reported twice."""
    notices, together = ErrorLog("x"), threading.Barrier(8)

    def work(rank: int) -> None:
        client = own_client(store)
        together.wait()
        notices.tell(client, "error", rank, "boom")
        notices.tell(client, "heard", rank, "boom")
        notices.take_back(client, "heard", rank, "boom")

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = notices.read(store)
    assert sorted(found["error"]) == list(range(8)) and not found["heard"]


def test_who_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ErrorBoard, "__init__", lambda self, rank: setattr(self, "rank", rank))
    near = lambda rank, ranks, most: ErrorBoard(rank).near(ranks, most)  # type: ignore[call-arg] # noqa: E731
    assert near(2, range(4), 8) == [3, 0, 1] and near(0, [0, 2, 4], 2) == [2, 4] and near(9, [5], 8) == [5]
    assert near(6, [0, 2, 4, 6, 8], 2) == [8, 0] and near(5, range(0, 100, 10), 3) == [10, 20, 30]
    large = range(16384)
    assert near(16383, large, 3) == [0, 1, 2] and near(5000, large, 2) == [5001, 5002]
    seen = {r for rank in large for r in near(rank, large, 2)}
    assert len(seen) == 16384, "all together look at all"


# --- ranks that look at one other each ----------------------------------------------------------------------


def four(rank: int, how: str) -> str:
    """Rank 3 is dead, elsewhere, or has finished, or fails; each of the others looks at the next one only."""
    error_propagation.NEAR = error_propagation.NEXT = 1
    groups = Groups(init_mesh("cpu", 3.0 if how == "elsewhere" else LONG, dp=4))
    meet_for(groups, "the start")
    if rank == 3:
        if how == "dies":
            os._exit(3)
        if how == "elsewhere":
            time.sleep(SOON)
        if how == "fails":
            with error_context("something"):
                raise KeyError("boom")
        return "finished"
    try:
        with error_context("something"):
            if how in ("dies", "elsewhere"):
                dist.all_reduce(torch.ones(1), group=groups.group("dp"))
            else:
                meet_for(groups, "the end")
    except CollectiveError as error:
        return str(error)
    return "went on"


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, dict[int, tuple[float, str]]]]:
    stays = {"dies": 3, "elsewhere": 3, "finishes": -1, "fails": -1}
    made = {how: World(4, functools.partial(four, how=how), stays[how]) for how in stays}
    yield {how: world.end() for how, world in made.items()}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("dies", "rank 3 did not respond: no sign of life"),
        ("elsewhere", "rank 3 did not respond: alive, but never joined this collective"),
        ("finishes", "rank 3 finished: its main returned"),
        ("fails", "rank 3 failed: KeyError: 'boom'"),
    ],
)
def test_all_name_the_rank_that_one_has_looked_at(found: Any, how: str, why: str) -> None:
    for rank in range(3):
        seconds, text = found[how][rank]
        assert seconds < SOON and why in text and f"failed on rank {rank}: " in text, text


def test_who_fails_in_a_large_world_asks_as_little(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else is there: what a rank asks until it says so, and while it waits for all."""
    monkeypatch.setattr(error_propagation, "SILENCE", 0.5)
    asked = []
    for world in (64, 16384):
        mine = ErrorBoard(store, 7, world, f"failures of {world}", LONG)
        asks = mine.line.ask
        monkeypatch.setattr(mine.line, "ask", lambda question, *limit, asks=asks: asks(lambda s: question(Counting(s)), *limit))  # fmt: skip # noqa: E501
        before = Counting.asked
        why = mine.explain(range(world), "a collective")
        assert why.startswith("ranks 8, 9, 10, 11, 12, 13, 14, 15 did not respond: no sign of life for"), why
        assert mine.trouble(range(world)) == "" and mine.at_work(mine.near(range(world))) == {}
        asked.append(Counting.asked - before)
        mine.close()
    assert asked[1] <= asked[0] < 300, asked

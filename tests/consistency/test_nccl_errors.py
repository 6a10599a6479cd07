"""Failures where work does not raise in ``wait``: every rank ends with an error that names who failed, as on gloo.

The ranks exchange over `tests.support.fake_nccl`, a stand-in for NCCL, with a timeout that is longer than a test may
take.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.exec.executor import Executor
from autopar.runtime.fault import aborts
from autopar.runtime.fault.errors import CollectiveError, error_context
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from tests.consistency.test_hangs import LONG, SOON, World, stop
from tests.runtime import hand_made
from tests.runtime.hand_made import Case
from tests.support import fake_nccl


def start(timeout: float, **sizes: int) -> Groups:
    dist.init_process_group("deaf")
    return Groups(init_mesh("cpu", timeout, **sizes))


def outcome(wait: Callable[[], Any]) -> str:
    """What came of a wait that cannot end, and of the next one."""
    found = []
    for _ in range(2):
        try:
            with error_context("saying goodbye"):
                wait()
                found.append("went on with a value that means nothing")
        except CollectiveError as error:
            found.append(str(error))
    return "\n".join(found)


def step(rank: int) -> str:
    """Of a pipeline on three ranks; rank 1 is killed in the middle of one."""
    groups, case = start(LONG, pp=3), Case(3, 3, skips=(2,))
    order = hand_made.order_of(case, "1f1b", 3)
    executor, values = Executor(hand_made.compiled_of(case, order), groups), hand_made.mine(case, order, rank)
    losses = [float(executor.run_step(values).losses[0]) for _ in range(2)]
    assert losses == pytest.approx([hand_made.expected(case)[0]] * 2, abs=1e-10)
    if rank == 1:
        entry = next(e for e in executor.program.entries if str(e.action) == "1F1")
        entry.instructions[0].apply = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    return outcome(lambda: executor.run_step(values))


def users_wait(rank: int) -> str:
    """Outside of our calls; rank 1 fails, and says with what. The watchdog of the groups sees nothing."""
    fake_nccl.watchdog = False
    groups = start(LONG, dp=2)
    dist.all_reduce(torch.ones(1), group=groups.group("dp"))
    if rank == 1:
        raise KeyError("boom")
    found: list[str] = []
    thread = threading.Thread(target=waits_outside, args=(groups, found))
    thread.start()
    thread.join()
    return found[0]


def waits_outside(groups: Groups, found: list[str]) -> None:
    """In a thread of its own, which is not the one that made the groups."""
    with error_context("the first part"):
        pass
    try:
        dist.all_reduce(torch.ones(1), group=groups.group("dp"))
        found.append("went on with a value that means nothing")
    except CollectiveError as error:
        found.append(str(error))


def stopped(rank: int) -> str:
    """Neither rank can tell what happened to rank 1, but that it does not beat."""
    fake_nccl.watchdog = False
    groups = start(LONG, dp=3)
    if rank == 1:
        stop()
    return outcome(lambda: dist.barrier(group=groups.group("dp")))


def absent(rank: int) -> str:
    """Rank 1 is alive and elsewhere, until the timeout of the group."""
    groups = start(2.0, dp=2)
    if rank == 1:
        time.sleep(SOON)
    return outcome(lambda: dist.all_reduce(torch.ones(1), group=groups.group("dp")))


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[str, World]]:
    """They mostly wait, so they do so side by side."""
    made = {
        "step": World(3, step, stays=1),
        "user's wait": World(2, users_wait, stays=-1),
        "stopped": World(3, stopped, stays=1, hosts=True),
        "absent": World(2, absent, stays=1),
    }
    yield made
    for one in made.values():
        for process in one.processes:
            process.kill()
            process.join()


def test_a_step_that_loses_a_rank_names_it_and_the_action(worlds: dict[str, World]) -> None:
    found = worlds["step"].end()
    assert found.keys() == {0, 2}
    for rank, (seconds, text) in found.items():
        first, second = text.splitlines()
        assert seconds < SOON and f"failed on rank {rank}: rank 1 did not respond: no sign of life" in first
        assert first.startswith(f"comm: {rank}") and "(pipeline, waits for rank" in first and "nothing" not in text
        assert first.count("failed on rank") == 1 and "rank 1 did not respond" in second


def test_a_wait_outside_of_our_calls_ends_with_the_error_of_the_rank_that_failed(worlds: dict[str, World]) -> None:
    found = worlds["user's wait"].end()
    assert found[1][1] == "KeyError: 'boom'"
    assert found[0][0] < SOON and found[0][1].endswith("failed on rank 0: rank 1 failed: KeyError: 'boom'"), found[0]


def test_a_stopped_rank_is_named(worlds: dict[str, World]) -> None:
    found = worlds["stopped"].end()
    assert found.keys() == {0, 2}
    for seconds, text in found.values():  # of which silence takes 16 here
        assert seconds < SOON + 12 and len(text.splitlines()) == 2
        assert all("rank 1 did not respond: no sign of life" in line for line in text.splitlines()), text


def test_a_rank_that_does_not_join_is_named_at_the_timeout(worlds: dict[str, World]) -> None:
    seconds, text = worlds["absent"].end()[0]
    assert seconds < SOON and "rank 1 did not respond: alive, but never joined" in text.splitlines()[0], text


# --- one process ------------------------------------------------------------------------------------------


@dataclass
class Stub:
    """A group whose abort waits for that of the other ones."""

    together: threading.Barrier
    ended: threading.Event = field(default_factory=threading.Event)

    def abort(self) -> None:
        self.together.wait(5)
        self.ended.set()

    def broken(self) -> bool:
        return False  # beats of this process look at it


def waiting(group: Stub, noticed: threading.Event, found: list[str]) -> threading.Thread:
    """A thread that waits for a group."""

    def work() -> None:
        try:
            group.ended.wait(10)  # in C
            found.append("went on")
        except CollectiveError as error:
            found.append(f"{type(error).__qualname__}: {error}; {error.why}; {noticed.is_set()}")

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def an_error() -> CollectiveError:
    error = CollectiveError("comm: x failed on rank 0: rank 1 failed")
    error.why = "rank 1 failed"
    return error


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Stub]:
    together = threading.Barrier(3)
    stubs = [Stub(together) for _ in range(3)]
    monkeypatch.setattr(aborts, "quiet_groups", lambda: stubs)
    monkeypatch.setattr(aborts, "NOTICED", 0.05)
    monkeypatch.setattr(aborts, "SPOKEN", 0.5)
    return stubs


def test_a_waiting_thread_raises_before_it_goes_on(groups: list[Stub], capsys: pytest.CaptureFixture[str]) -> None:
    noticed, found = threading.Event(), list[str]()
    thread = waiting(groups[1], noticed, found)
    aborts.end_waits(thread.ident or 0, an_error(), noticed)
    thread.join(5)
    assert found == ["CollectiveError: comm: x failed on rank 0: rank 1 failed; rank 1 failed; True"]
    assert all(stub.ended.is_set() for stub in groups) and not capsys.readouterr().err


def test_a_thread_that_raises_by_itself_is_left_alone(groups: list[Stub]) -> None:
    noticed, found = threading.Event(), list[str]()
    thread = waiting(groups[1], noticed, found)
    noticed.set()
    aborts.end_waits(thread.ident or 0, an_error(), noticed)
    thread.join(5)
    assert found == ["went on"]


def test_an_error_that_nobody_raises_is_printed(groups: list[Stub], capsys: pytest.CaptureFixture[str]) -> None:
    aborts.end_waits(0, an_error(), threading.Event())
    assert capsys.readouterr().err == "comm: x failed on rank 0: rank 1 failed\n"


def test_more_groups_than_streams_are_told(groups: list[Stub], recwarn: pytest.WarningsRecorder) -> None:
    aborts.tell_count()
    assert not recwarn.list
    groups *= 11
    with pytest.warns(UserWarning, match="in 33 process groups on the GPU, torch has 32 streams"):
        aborts.tell_count()


def test_the_watchdog_of_torch_leaves_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in aborts.HANDLING:
        monkeypatch.delenv(name, raising=False)
    aborts.leave_to_us()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    aborts.leave_to_us()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_remembering_costs_little() -> None:
    start = time.process_time()
    for _ in range(10_000):
        aborts.started(sys.exit, "asked for only if it fails")
    assert time.process_time() - start < 0.1  # 10 us each; about 0.1 us on an idle machine
    aborts.started(str, "all_reduce")
    assert aborts.last_started() == "all_reduce"

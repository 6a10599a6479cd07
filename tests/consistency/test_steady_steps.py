"""Steps that all expect ask nothing of the store; a rank that does something else, or is gone, ends the wait of all.

Each failure has a world of its own (forked ranks, its own store), with a timeout longer than a test may take.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.adapters.distributed import default_store, own_client
from autopar.runtime.fault import errors, heartbeat
from autopar.runtime.fault.call_sequence import CallSequence, Place, Places, places_in
from autopar.runtime.fault.error_propagation import ranks_named
from autopar.runtime.fault.errors import board
from autopar.runtime.fault.store_client import StoreClient
from tests.consistency.test_hangs import LONG, SOON, World
from tests.faults.cases import Stack
from tests.runtime.test_groups import Counting
from tests.support import fake_nccl  # noqa: F401 - registers its backend
from tests.support.compile_cache import compiled_by_one
from tests.support.plain_models import Net, build, numbers, part, put
from tests.support.ranks import run_ranks

# --- questions of a step ----------------------------------------------------------------------------------


def questions(sizes: dict[str, int], options: dict[str, Any]) -> list[int]:
    """How many this rank asks in each of some rounds of a loop: step, clip, optimizer."""
    torch.manual_seed(0)
    batch = {name: torch.randn(8, 8, dtype=torch.float64) for name in ("x", "y")}
    mine = {k: v.chunk(sizes.get("dp", 1))[dist.get_rank() % sizes.get("dp", 1)] for k, v in batch.items()}
    mesh = autopar.init_mesh("cpu", 30.0, **sizes)
    parallel = autopar.parallelize(Stack().double(), mesh, example_batch=mine, **options)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    board().line = StoreClient(default_store(), connect=lambda store: Every(own_client(store)))
    found = []
    for _ in range(14):
        before = Every.asked
        parallel.train_step(**mine)
        parallel.clip_grad_norm_(1.0)
        optimizer.step(), optimizer.zero_grad()
        found.append(Every.asked - before)
    for _ in range(6):
        before = Every.asked
        parallel.eval_step(**mine)
        found.append(Every.asked - before)
    return found


class Every(Counting):
    """A client of the store that counts every question."""

    asked = 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            Every.asked += 1
            return getattr(self._store, name)(*args)

        return call


@pytest.mark.parametrize(
    ("ranks", "sizes", "options"),
    [
        (2, {"dp": 2}, {"zero": 3}),
        (4, {"tp": 2, "dp": 2}, {}),
        (2, {"pp": 2}, {"microbatches": 2, "schedule": "1f1b"}),
    ],
    ids=["dp", "dp-tp", "pp"],
)
def test_a_step_that_all_expect_asks_nothing(ranks: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
    for found in run_ranks(ranks, questions, sizes, options, timeout=120):
        trained, evaluated = found[:14], found[14:]
        assert trained[0] > 6 and trained[4:] == [0] * 10, found
        assert evaluated[0] > 4 and evaluated[3:] == [0] * 3, found


def test_a_beat_asks_four_questions() -> None:
    asked: list[str] = []

    class Spy(dist.HashStore):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in ("set", "get", "add", "check", "compare_set"):
                asked.append(name)
            return super().__getattribute__(name)

    with (
        patch.object(heartbeat.threading.Thread, "start"),
        patch.object(StoreClient, "ask", lambda line, ask, *_: ask(Spy())),
    ):
        beat = heartbeat.Heartbeat(dist.HashStore(), 0, 16384, "x", str, Places(), lambda _: None, 1.0, ranks_named)
    asked.clear()
    assert beat.look(Spy()) == "" and len(asked) == 4
    assert heartbeat.beat_of(2) == heartbeat.beat_of(4096) == 1 and 16384 / heartbeat.beat_of(16384) <= 4096


# --- what is expected -------------------------------------------------------------------------------------


def followed(order: CallSequence, calls: str) -> str:
    """ "?" for each call that is agreed on."""
    out = ""
    for call in calls:
        out += "." if order.expects(call) else "?"
        if order.expects(call):
            order.goes_on(call)
        else:
            order.meets()
            order.agreed(call)
    return out


def test_what_followed_before_is_expected() -> None:
    order = CallSequence("m", Places())
    assert followed(order, "tttttttt") == "??......"
    assert followed(order, "eeee") == "??.." and followed(order, "t" * 16)[9:] == "......."
    epoch = "t" * 20 + "e" * 5
    assert followed(order, epoch * 8)[-50:].count("?") == 4
    for loop in ("tc", "tttc", "tetc", "tttttttc"):  # gradients of some batches, then a clip
        order = CallSequence("m", Places())
        assert "?" not in followed(order, loop * 40)[-40:], loop
        assert order.number == 40 * len(loop) and str(order._calls) == f"m|{order.number}|0"
    order.forget()
    assert followed(order, "ttt")[0] == "?"


def test_ranks_that_follow_the_same_expect_the_same() -> None:
    """Of two that make different calls one at most goes on with what is expected, whatever both did before."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        past = "".join("tce"[int(i)] for i in torch.randint(0, 3, (30,), generator=generator))
        one, two = CallSequence("m", Places()), CallSequence("m", Places())
        assert followed(one, past) == followed(two, past) and one.past == two.past
        assert sum(one.expects(call) for call in "tce") <= 1
        assert all(one.expects(call) == two.expects(call) for call in "tce")


def test_places_are_read_as_they_are_shown() -> None:
    calls = Places()
    for name, number, meets in (("dp=2/1", 3, True), ("dp=2/2", 9, False), ("dp=2/1", 4, False)):
        calls.be_at(Place(name, number, meets))
    there = places_in(str(calls))
    assert there == {"dp=2/2": Place("dp=2/2", 9, False), "dp=2/1": Place("dp=2/1", 4, False)} and places_in("") == {}
    assert there["dp=2/1"].passed(4) and there["dp=2/1"].passed(3) and not there["dp=2/1"].passed(5)
    assert not Place("m", 4, True).passed(4) and Place("m", 5, True).passed(4)
    assert calls.beyond({"dp=2/1": Place("dp=2/1", 3, False)}) and not calls.beyond(there) and not calls.beyond({})


# --- ranks that do something else -------------------------------------------------------------------------


def batch_of(rows: int) -> dict[str, Tensor]:
    return {"x": torch.ones(rows, 12, dtype=torch.float64), "target": torch.ones(rows, 8, dtype=torch.float64)}


def trained(rank: int, steps: int, backend: str = "") -> autopar.ParallelModule:
    """A model after some steps."""
    if backend:
        dist.init_process_group(backend)
    torch.manual_seed(0)
    mesh = autopar.init_mesh("cpu", LONG, dp=2)
    parallel = autopar.parallelize(Net().double(), mesh, example_batch=batch_of(4))
    for _ in range(steps):
        parallel.train_step(**batch_of(4))
    return parallel


def outcome(*calls: Callable[[], Any]) -> str:
    """What came of them, by lines."""
    found = []
    for call in calls:
        try:
            found.append(f"went on with {type(call()).__name__}")
        except (ValueError, errors.CollectiveError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return "\n".join(found)


def other_batch(rank: int, *, steps: int, evaluated: bool = False, backend: str = "") -> str:
    """After some steps a rank has a smaller batch; then both have the same again."""
    parallel = trained(rank, steps, backend)
    if evaluated:  # what comes next is not expected, on either rank
        parallel.eval_step(**batch_of(4))
    mine = batch_of(4 - 2 * rank)
    return outcome(lambda: parallel.train_step(**mine), lambda: parallel.train_step(**batch_of(4)))


def other_call(rank: int) -> str:
    """One evaluates, which needs nobody else, where the other one trains as before."""
    parallel = trained(rank, 14)
    if rank:
        return outcome(lambda: parallel.eval_step(**batch_of(4)), lambda: parallel.train_step(**batch_of(4)))
    return outcome(lambda: [parallel.train_step(**batch_of(4)) for _ in range(3)])


def other_in_a_pipeline(rank: int) -> str:
    """Its ranks vote in each call: one has a smaller batch, then one clips where the other one trains."""
    torch.manual_seed(0)
    batch = {name: torch.ones(8, 8, dtype=torch.float64) for name in ("x", "y")}
    mesh = autopar.init_mesh("cpu", LONG, pp=2)
    parallel = autopar.parallelize(Stack().double(), mesh, example_batch=batch, microbatches=2)
    for _ in range(6):
        parallel.train_step(**batch)
    mine = {name: x[: 8 - 4 * rank] for name, x in batch.items()}
    step = functools.partial(parallel.train_step, **batch)
    clip = functools.partial(parallel.clip_grad_norm_, 1.0)
    return outcome(lambda: parallel.train_step(**mine), step, clip if rank else step, step)


def other_model(rank: int) -> str:
    """Two models in turn; a rank has a smaller batch for the second one, whose evaluation needs nobody else."""
    one = trained(rank, 0)
    two = autopar.parallelize(Net().double(), one.mesh, example_batch=batch_of(4))
    train, evaluate = functools.partial(one.train_step, **batch_of(4)), functools.partial(two.eval_step, **batch_of(4))
    for _ in range(6):
        train(), evaluate()
    return outcome(train, functools.partial(two.eval_step, **batch_of(2)) if rank else evaluate, train, train)


def dies(rank: int, *, steps: int, evaluated: bool = False, how: str = "killed") -> str:
    """Before a step: in the first one, among many, where something else comes, or because it has done its last."""
    parallel = trained(rank, steps)
    if rank:
        if how == "finished":
            return "finished"
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    step = parallel.eval_step if evaluated else parallel.train_step
    return outcome(lambda: step(**batch_of(4)))


def slow(rank: int) -> str:
    """A rank that is slow where a step is expected, and where one is agreed on, is waited for."""
    parallel = trained(rank, 12)
    calls = []
    for step in (parallel.train_step, parallel.eval_step, parallel.train_step, parallel.train_step):
        if rank:
            time.sleep(3)
        calls.append(outcome(functools.partial(step, **batch_of(4))))
    return "\n".join(calls)


BODIES: dict[str, tuple[Callable[[int], str], int]] = {  # and who does not end
    "other batch, first step": (functools.partial(other_batch, steps=0), -1),
    "other batch, steady": (functools.partial(other_batch, steps=14), -1),
    "other batch, steady, on a GPU": (functools.partial(other_batch, steps=14, backend="deaf"), -1),
    "other batch, at a change": (functools.partial(other_batch, steps=3, evaluated=True), -1),
    "other call": (other_call, -1),
    "other, in a pipeline": (other_in_a_pipeline, -1),
    "other model": (other_model, -1),
    "dies, first step": (functools.partial(dies, steps=0), 1),
    "dies, steady": (functools.partial(dies, steps=14), 1),
    "stops, steady": (functools.partial(dies, steps=14, how="stopped"), 1),
    "dies, at a change": (functools.partial(dies, steps=3, evaluated=True), 1),
    "finished, steady": (functools.partial(dies, steps=14, how="finished"), -1),
    "finished, at a change": (functools.partial(dies, steps=3, evaluated=True, how="finished"), -1),
    "slow": (slow, -1),
}


def sharing(body: Callable[[int], str], folder: Path, rank: int) -> str:
    """What a rank of any world has compiled the others need not."""
    compiled_by_one(folder, rank)
    return body(rank)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[int, tuple[float, str]]]]:
    """What came of all, a few at a time, beside those that wait until a rank has been silent for too long."""
    folder = tmp_path_factory.mktemp("compiled")

    def world(name: str) -> World:
        body, stays = BODIES[name]
        return World(2, functools.partial(sharing, body, folder), stays)

    waiting = {name: world(name) for name in BODIES if name.startswith(("dies", "stops", "slow"))}
    names, found = [name for name in BODIES if name not in waiting], {}
    for some in (names[i : i + 3] for i in range(0, len(names), 3)):
        made = {name: world(name) for name in some}
        found |= {name: one.end() for name, one in made.items()}
    yield found | {name: one.end() for name, one in waiting.items()}


NEED = "agree: the step and the shapes of the batch must be the same on all ranks, found"
SMALL = "x: rank 1: (2, 12) torch.float64; against rank 0: (4, 12) torch.float64"


@pytest.mark.parametrize("phase", ["first step", "at a change"])
def test_another_batch_where_all_ask(worlds: Any, phase: str) -> None:
    """The same error on both; then they go on."""
    found = worlds[f"other batch, {phase}"]
    assert found[0][1] == found[1][1]
    first, second = found[0][1].splitlines()
    assert first.startswith("ValueError: ") and "x: rank 1: (2, 12)" in first and "(4, 12)" in first
    assert second == "went on with Tensor"


@pytest.mark.parametrize("device", ["", ", on a GPU"])
def test_another_batch_where_none_is_expected(worlds: Any, device: str) -> None:
    found = worlds[f"other batch, steady{device}"]
    (slow, first), (_, other) = found[0], found[1]
    assert slow < SOON
    assert other.splitlines()[0].startswith(f"ValueError: {NEED} {SMALL}") and "uneven" in other
    assert f"failed on rank 0: rank 1 failed: ValueError: {NEED} {SMALL}" in first.splitlines()[0], first
    for text in (first, other):
        second = text.splitlines()[1]
        assert second.startswith("CollectiveError: ") and "rank 1 failed: ValueError" in second


def test_another_call(worlds: Any) -> None:
    """Which needs no other rank: the one that asks gets the error, and ends the others."""
    found = worlds["other call"]
    assert "found the call: rank 1: eval_step; against rank 0: train_step" in found[1][1], found[1]
    assert "CollectiveError" in found[0][1] and "rank 1 failed: ValueError: agree: " in found[0][1], found[0]


def test_other_things_in_a_pipeline(worlds: Any) -> None:
    """The same error on both, at once; then they go on."""
    found = worlds["other, in a pipeline"]
    (seconds, text), (_, other) = found[0], found[1]
    batch, on, call, again = text.splitlines()
    assert seconds < SOON and text == other and on == again == "went on with Tensor"
    assert "x: rank 1: (4, 8)" in batch and "rank 1: clip_grad_norm_; against rank 0: the batch" in call, text


def test_another_batch_of_another_model(worlds: Any) -> None:
    found = worlds["other model"]
    assert "x: rank 1: (2, 12)" in found[1][1].splitlines()[1], found
    for seconds, text in found.values():
        last = text.splitlines()[-1]
        assert seconds < SOON and last.startswith("CollectiveError: ") and "rank 1 failed: ValueError: agree" in last, (
            text
        )


@pytest.mark.parametrize("name", ["dies, first step", "dies, steady", "stops, steady", "dies, at a change"])
def test_a_rank_that_is_gone(worlds: Any, name: str) -> None:
    (seconds, text), *others = worlds[name].values()
    assert not others and seconds < SOON
    assert text.startswith("CollectiveError: ") and "rank 1 did not respond" in text, text


@pytest.mark.parametrize("name", ["finished, steady", "finished, at a change"])
def test_a_rank_that_has_finished(worlds: Any, name: str) -> None:
    seconds, text = worlds[name][0]
    assert seconds < SOON and "rank 1 finished: its main returned" in text, text


def test_a_slow_rank_is_waited_for(worlds: Any) -> None:
    for _, text in worlds["slow"].values():
        assert [line.partition(" with ")[0] for line in text.splitlines()] == ["went on"] * 4, text


# --- contents of batches ----------------------------------------------------------------------------------


def contents(sizes: dict[str, int]) -> list[str]:
    """In steps that all expect: the batch of one rank has another last bit, or is another one."""
    parallel, mine = put(build(Net), numbers(), sizes), part(numbers(), sizes)
    for _ in range(12):
        parallel.train_step(**mine)
    before = {n: p.grad.clone() for n, p in parallel.named_parameters() if p.grad is not None}
    bent = {n: x.clone() for n, x in mine.items()}
    bent["x"][0, 0] += 1e-15 * (dist.get_rank() == 1)
    found = [outcome(lambda: parallel.train_step(**bent))]
    assert all(
        torch.equal(before[n].to_local(), p.grad.to_local()) for n, p in parallel.named_parameters() if n in before
    )
    return [*found, *(outcome(lambda: parallel.train_step(**mine)) for _ in range(3))]


@pytest.mark.parametrize(("ranks", "sizes"), [(2, {"tp": 2}), (4, {"dp": 2, "tp": 2})])
def test_contents_are_compared_in_expected_steps(ranks: int, sizes: dict[str, int]) -> None:
    every = run_ranks(ranks, contents, sizes)
    assert all(found == every[0] for found in every)
    assert "the ranks of 'tp' must be given the same batch, found x: rank 1: " in every[0][0]
    assert every[0][1:] == ["went on with Tensor"] * 3

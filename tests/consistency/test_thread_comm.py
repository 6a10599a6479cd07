"""Ranks as threads find the mistakes that a network would punish."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autopar.attention.exchanges import Like
from autopar.testing.thread_comm import ThreadComm, run

FOUR = Like((4,), torch.float32)


def pass_on(comm: ThreadComm, like: Like = FOUR) -> torch.Tensor:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    (found,) = comm.exchange("up", "x", (right, [torch.full((4,), float(comm.rank))]), (left, [like])).wait()
    return found


def test_exchanges_collectives_and_counts() -> None:
    def work(comm: ThreadComm) -> tuple[float, list[float], float]:
        found = pass_on(comm)[0].item()
        (gathered,) = comm.all_gather("y", torch.tensor(float(comm.rank))).wait()
        (reduced,) = comm.reduce_scatter("z", torch.arange(3.0)).wait()
        return found, gathered.tolist(), reduced.item()

    results, comms = run(3, work)
    assert results == [((rank - 1) % 3, [0, 1, 2], 3 * rank) for rank in range(3)]
    for comm in comms:
        assert (comm.bytes("up"), comm.bytes("all_gather"), comm.bytes("reduce_scatter")) == (16, 8, 8)
        assert comm.messages("up") == 1 and comm.messages("home", "down") == 0
        assert comm.events == ["start", "wait"] * 3


def test_messages_of_a_pair_are_matched_by_the_order_of_their_start() -> None:
    def work(comm: ThreadComm) -> list[float]:
        other = 1 - comm.rank
        first, second = (
            comm.exchange("home", "x", (other, [torch.full((4,), float(n))]), (other, [FOUR])) for n in range(2)
        )
        return [second.wait()[0][0].item(), first.wait()[0][0].item()]

    assert run(2, work)[0] == [[1, 0], [1, 0]]


def deadlock(comm: ThreadComm) -> None:
    if comm.rank == 0:
        comm.exchange("up", "x", None, (1, [FOUR])).wait()


def wrong_shape(comm: ThreadComm) -> None:
    pass_on(comm, Like((5,), torch.float32))


def changed(comm: ThreadComm) -> None:
    x, other = torch.zeros(4), 1 - comm.rank
    pending = comm.exchange("up", "x", (other, [x]), (other, [FOUR]))
    x += 1
    pending.wait()


def not_waited(comm: ThreadComm) -> None:
    other = 1 - comm.rank
    comm.exchange("up", "x", (other, [torch.zeros(4)]), (other, [FOUR]))


def never_received(comm: ThreadComm) -> None:
    if comm.rank == 0:
        comm.exchange("up", "x", (1, [torch.zeros(4)]), None).wait()


def of_its_own(comm: ThreadComm) -> None:
    if comm.rank == 1:
        raise ValueError("of its own")
    pass_on(comm)


def strided(comm: ThreadComm) -> None:
    comm.exchange("up", "x", (1 - comm.rank, [torch.zeros(4, 2).t()]), None)


@pytest.mark.parametrize(
    ("work", "error", "text"),
    [
        (wrong_shape, AssertionError, "was expected"),
        (changed, AssertionError, "changed while"),
        (not_waited, AssertionError, "did not wait for 1"),
        (of_its_own, ValueError, "of its own"),
        (strided, AssertionError, "not contiguous"),
    ],
)
def test_mistakes(work: Callable[[ThreadComm], None], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        run(2, work)


@pytest.mark.parametrize("work", [deadlock, never_received])
def test_deadlocks(work: Callable[[ThreadComm], None]) -> None:
    with pytest.raises(TimeoutError, match="deadlock"):
        run(2, work, patience=0.3)

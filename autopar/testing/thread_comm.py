"""Ranks as threads of one process, with checked and counted exchanges.

    results, comms = run(4, lambda comm: comm.all_gather("x", torch.ones(2) * comm.rank).wait())

A deadlock, a message with another shape than announced, one that changes while it is sent, and one that is never
received are errors; an error of any rank ends all of them.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from autopar.attention.exchanges import WAYS, Expected, Like, Pending, Sent

T = TypeVar("T")
StoreClient = tuple[int, int, str, int]  # source, target, way, number of a message
PATIENCE = 20.0  # seconds that a rank waits for another one


class Stopped(Exception):
    """Another rank failed."""


class Switch:
    """Message queues that all ranks share, one per (source, target, way). A rank runs while it holds ``turn`` and
    releases it while waiting, so that one rank runs at a time."""

    def __init__(self, patience: float) -> None:
        self.turn, self.patience = threading.Lock(), patience
        self.lines: dict[object, deque[list[Tensor]]] = {}
        self.waiting: dict[object, threading.Condition] = {}
        self.failed = False

    def put(self, line: object, letter: list[Tensor]) -> None:
        self.lines.setdefault(line, deque()).append(letter)
        if line in self.waiting:
            self.waiting[line].notify_all()

    def get(self, line: object) -> list[Tensor]:
        """The next message of a queue. Raises TimeoutError if none arrives."""
        if not self.failed and not self.lines.get(line):
            come = self.waiting.setdefault(line, threading.Condition(self.turn))
            come.wait_for(lambda: self.failed or self.lines.get(line), self.patience)
        if self.failed:
            raise Stopped
        if not self.lines.get(line):
            raise TimeoutError(f"deadlock: no message on {line}")
        return self.lines[line].popleft()

    def fail(self) -> None:
        self.failed = True
        for waiting in self.waiting.values():
            waiting.notify_all()


@dataclass
class SentMessage:
    """One message: contents, way, target and bytes."""

    way: str
    what: str
    target: int
    bytes: int


class ThreadComm:
    """A `Comm` whose ranks are threads. A send completes when its receiver has requested it, as in a real network.

    sent: its messages, collectives among them with the bytes that a ring would send. events: the exchanges started
    ("start") and waited for ("wait"), and whatever else a test adds. most_received: of one message, in bytes.
    """

    def __init__(self, rank: int, size: int, switch: Switch) -> None:
        self.rank, self.size, self.switch = rank, size, switch
        self.sent: list[SentMessage] = []
        self.events: list[object] = []
        self.started: Counter[tuple[object, ...]] = Counter()
        self.most_received = 0
        self.waiting = 0

    def exchange(self, way: str, what: str, send: Sent | None, receive: Expected | None) -> Pending:
        assert way in WAYS, way
        assert send or receive, "an empty exchange"
        step = {"up": 1, "down": -1}
        letter = request = None
        if send:
            target, tensors = send
            assert way == "home" or target == (self.rank + step[way]) % self.size
            assert target != self.rank and any(x.numel() for x in tensors), f"{what}: nothing to send"
            assert all(x.is_contiguous() for x in tensors), f"{what} is not contiguous"
            self.sent.append(SentMessage(way, what, target, sum(x.nbytes for x in tensors)))
            letter = self._line(self.rank, target, way)
            self.switch.put(letter, [x.clone() for x in tensors])
        if receive:
            assert way == "home" or receive[0] == (self.rank - step[way]) % self.size
            request = self._line(receive[0], self.rank, way)
            self.switch.put((*request, "asked for"), [])
        self.events.append("start")
        self.waiting += 1
        return _Exchange(self, what, send, letter, receive, request)

    def _line(self, source: int, target: int, way: str) -> StoreClient:
        """The queue of the next message: messages of a pair and a way are matched in the order in which they start."""
        self.started[source, target, way] += 1
        return source, target, way, self.started[source, target, way]

    def all_gather(self, what: str, x: Tensor) -> Pending:
        self.sent.append(SentMessage("all_gather", what, -1, (self.size - 1) * x.nbytes))
        return _ThreadCollective(self, [x] * self.size, lambda pieces: torch.stack(pieces))

    def reduce_scatter(self, what: str, x: Tensor) -> Pending:
        assert x.shape[0] == self.size
        self.sent.append(SentMessage("reduce_scatter", what, -1, (self.size - 1) * x[0].nbytes))
        return _ThreadCollective(self, list(x), lambda pieces: torch.stack(pieces).sum(0))

    def bytes(self, *ways: str) -> int:
        """Bytes sent by these ways."""
        return sum(s.bytes for s in self.sent if s.way in ways)

    def messages(self, *ways: str) -> int:
        """Number of messages sent."""
        return len([s for s in self.sent if s.way in ways])

    def arrived(self, letter: list[Tensor]) -> list[Tensor]:
        self.waiting -= 1
        self.events.append("wait")
        self.most_received = max(self.most_received, sum(x.nbytes for x in letter))
        return letter


class _Exchange:
    def __init__(
        self,
        comm: ThreadComm,
        what: str,
        send: Sent | None,
        letter: StoreClient | None,
        receive: Expected | None,
        request: StoreClient | None,
    ) -> None:
        self.comm, self.what, self.letter, self.request = comm, what, letter, request
        self.likes = list(receive[1]) if receive else []
        self.sent = list(send[1]) if send else []
        self.before = [x.clone() for x in self.sent]

    def wait(self) -> list[Tensor]:
        found = self.comm.switch.get(self.request) if self.request else []
        likes = [Like(tuple(x.shape), x.dtype) for x in found]
        assert likes == self.likes, f"{self.what}: {likes} arrived on {self.request}, {self.likes} was expected"
        if self.letter:
            self.comm.switch.get((*self.letter, "asked for"))
        for now, before in zip(self.sent, self.before, strict=True):
            assert torch.equal(now, before), f"{self.what} changed while it was sent"
        return self.comm.arrived(found)


class _ThreadCollective:
    """All ranks send to all ranks, themselves included."""

    def __init__(self, comm: ThreadComm, pieces: list[Tensor], join: Callable[[list[Tensor]], Tensor]) -> None:
        self.comm, self.join = comm, join
        comm.started["collective",] += 1
        self.number = comm.started["collective",]
        comm.waiting += 1
        comm.events.append("start")
        for target, piece in enumerate(pieces):
            comm.switch.put((comm.rank, target, self.number), [piece.clone()])

    def wait(self) -> list[Tensor]:
        comm = self.comm
        pieces = [comm.switch.get((source, comm.rank, self.number))[0] for source in range(comm.size)]
        return comm.arrived([self.join(pieces)])


def run(size: int, fn: Callable[[ThreadComm], T], patience: float = PATIENCE) -> tuple[list[T], list[ThreadComm]]:
    """(results of ``fn`` on each rank, their communicators). Raises the error of a rank."""
    switch = Switch(patience)
    comms = [ThreadComm(rank, size, switch) for rank in range(size)]
    results: dict[int, T] = {}
    errors: dict[int, Exception] = {}

    def work(comm: ThreadComm) -> None:
        with switch.turn:
            try:
                results[comm.rank] = fn(comm)
                assert not comm.waiting, f"rank {comm.rank} did not wait for {comm.waiting} exchanges"
            except Exception as error:
                errors[comm.rank] = error
                switch.fail()

    threads = [threading.Thread(target=work, args=(comm,), daemon=True) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * patience)
    for error in sorted(errors.values(), key=lambda e: isinstance(e, Stopped)):
        raise error
    assert len(results) == size, "a rank did not finish"
    left = {line for line, letters in switch.lines.items() if letters}
    assert not left, f"sent but never received: {left}"
    return [results[rank] for rank in range(size)], comms

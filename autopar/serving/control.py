"""`Control`: messages between the hosts of all ranks, from the leader (world rank 0) to all and back.

A message is a header and a pickle. A message to all is one broadcast of as many bytes as the last one had, and some
more; a longer one takes a second broadcast. A message to the leader is a send of a fixed number of bytes, for which the
leader is ready before the sender has it; a longer one takes a second send.
"""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.fault.errors import board, explained
from autopar.runtime.mesh.process_groups import PATIENCE, Groups

LEADER = 0
_HEADER = 8  # bytes that say how long the pickle is
_SLOT = 16 * 1024  # bytes of a message that needs no second one: at first, and of those to the leader
_ROOM = 4096  # bytes by which the next message may be longer
_LOOK = timedelta(seconds=5)  # after which waiting ranks look whether the leader lives
_SLOT_TAG, _REST_TAG = 1, 2
_MOST_SENT = 64  # messages to the leader that may be on their way, more than steps in flight


def _packed(message: Any, first: int) -> list[Tensor]:
    """A message as ``first`` bytes, and the rest if there is one."""
    text = pickle.dumps(message)
    whole = bytearray(len(text).to_bytes(_HEADER, "little") + text)
    whole.extend(bytes(max(0, first - len(whole))))
    return [part for part in torch.frombuffer(whole, dtype=torch.uint8).tensor_split([first]) if len(part)]


def _length(slot: Tensor) -> int:
    """Of the whole message, from its beginning."""
    return _HEADER + int.from_bytes(slot[:_HEADER].numpy().tobytes(), "little")


def _next_slot(length: int) -> int:
    """Bytes of the first part of the message behind one of this length; sender and receivers compute it alike."""
    return -(-length // _ROOM) * _ROOM + _ROOM


def _unpacked(slot: Tensor, rest: Tensor | None) -> Any:
    text = slot[_HEADER:].numpy().tobytes() + (b"" if rest is None else rest.numpy().tobytes())
    return pickle.loads(text)


@dataclass
class Expected:
    """A message that a rank will send."""

    rank: int
    work: Any
    slot: Tensor


class Control:
    """Messages among all ranks of a mesh; collective to make. ``groups`` None: this process is alone."""

    def __init__(self, groups: Groups | None = None) -> None:
        self.rank = 0 if groups is None else groups.rank
        self.world = 1 if groups is None else groups.mesh.world_size
        self.limit = timedelta(0) if groups is None else groups.timeout
        self._group = None if groups is None or self.world == 1 else groups.control(PATIENCE)
        self._slot = _SLOT  # bytes of the next message to all
        self._sending: deque[tuple[Any, Tensor]] = deque()  # kept until they have arrived

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader."""
        return self.rank == LEADER

    # --- from the leader to all -----------------------------------------------------------------------------------

    def broadcast(self, message: Any) -> None:
        """Send a message to all other ranks."""
        if self._group is not None:
            with explained("sending a step of serving", range(self.world)):
                parts = _packed(message, self._slot)
                for part in parts:
                    self._wait(dist.broadcast(part, LEADER, group=self._group, async_op=True))
                self._slot = _next_slot(_length(parts[0]))

    def try_to_broadcast(self, message: Any) -> None:
        """The same when this rank gives up: nobody may be there."""
        if self._group is not None:
            try:
                self._sending += [
                    (dist.broadcast(part, LEADER, group=self._group, async_op=True), part)
                    for part in _packed(message, self._slot)
                ]
            except RuntimeError:  # its own error explains more
                return

    def receive(self) -> Any:
        """The leader's next message."""
        with explained("waiting for a step of serving", range(self.world)):
            slot, rest = torch.empty(self._slot, dtype=torch.uint8), None
            self._wait(dist.broadcast(slot, LEADER, group=self._group, async_op=True))
            self._slot = _next_slot(_length(slot))
            if (more := _length(slot) - len(slot)) > 0:
                rest = torch.empty(more, dtype=torch.uint8)
                self._wait(dist.broadcast(rest, LEADER, group=self._group, async_op=True))
        return _unpacked(slot, rest)

    def _wait(self, work: Any) -> None:
        """Until it is done, or another rank is known to be gone."""
        while True:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError as error:
                # Of a broadcast, unlike a receive, waiting goes on after its time is over.
                if work.is_completed():
                    work.wait()  # raises its own error, if it has one
                    return
                if board().trouble(range(self.world)):
                    raise board().failed("a step of serving", range(self.world), error) from error

    # --- to the leader --------------------------------------------------------------------------------------------

    def tell_leader(self, message: Any) -> None:
        """Send a message to the leader, who expects it."""
        with explained("sending tokens to rank 0", [LEADER]):
            while len(self._sending) >= _MOST_SENT:
                self._sending.popleft()[0].wait()  # gloo does not say whether a send is done
            for part, tag in zip(_packed(message, _SLOT), (_SLOT_TAG, _REST_TAG)):
                self._sending.append((dist.isend(part, LEADER, group=self._group, tag=tag), part))

    def expect(self, rank: int) -> Expected:
        """The leader is ready for one more message of a rank. Messages come in the order in which they are expected."""
        slot = torch.empty(_SLOT, dtype=torch.uint8)
        with explained(f"waiting for tokens of rank {rank}", [rank]):
            return Expected(rank, dist.irecv(slot, rank, group=self._group, tag=_SLOT_TAG), slot)

    def received(self, expected: Expected) -> Any:
        """The message, when it is there."""
        with explained(f"waiting for tokens of rank {expected.rank}", [expected.rank]):
            expected.work.wait(self.limit)
            rest = None
            if (more := _length(expected.slot) - _SLOT) > 0:
                rest = torch.empty(more, dtype=torch.uint8)
                work: Any = dist.irecv(rest, expected.rank, group=self._group, tag=_REST_TAG)
                work.wait(self.limit)
        return _unpacked(expected.slot, rest)

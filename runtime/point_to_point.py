"""Sends and receives along the pipeline axis: asynchronous, matched by order, failures explained, bytes counted.

    rank 0    send(0SF0>1, to 1, [x])         rank 1    pending = post(1RF0<0, from 0, [buffer])
                                                        [x] = wait(pending)

There are two process groups: one for what goes to higher coordinates, one for what goes to lower ones. NCCL has one
stream of transfers per group and pair of ranks and no tags, so a forward and a backward that cross would block each
other in one group. Both ends list the transfers of a pair in the same order
(`autopar.schedule.order_checks.check_channels`).

A send keeps its tensors until `arrived` says that the other side has them, at last until `flush`. gloo cannot be
polled (``is_completed`` turns true in ``wait`` only) and drops a send whose work nobody holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.comm import Ledger, Traffic, Work
from autopar.runtime.failures import CollectiveError, board
from autopar.runtime.groups import Groups
from autopar.schedule.order import TRANSFERS, Action, Order
from autopar.schedule.order_checks import counterpart

AXIS = "pp"


@dataclass(slots=True)
class PendingTransfer:
    """A transfer on its way: its tensors, and what to wait for. ``peer``: coordinate of the other end."""

    action: Action
    peer: int
    works: list[Work]
    tensors: list[Tensor]


class Channels:
    """The transfers of one rank. ``traffic``: what it has sent so far."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._ranks = groups.ranks(AXIS)
        self._me = groups.coordinate.get(AXIS, 0)
        self._sends: dict[Action, PendingTransfer] = {}
        self._calls = self._bytes = 0

    @property
    def traffic(self) -> Ledger:
        return {(AXIS, "send"): Traffic(self._calls, self._bytes)} if self._calls else {}

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Send a byte both ways between pairs of coordinates. NCCL connects a pair at its first transfer and blocks
        until both are there; in the midst of a schedule this could close a circle. All ranks give the same pairs."""
        for low, high in sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}):
            for source, target in ((low, high), (high, low)):
                group = self._groups.channel("up" if source < target else "down")
                token = torch.zeros(1, dtype=torch.uint8, device=self._groups.device)
                if self._me == source:
                    self._join(group.send([token], target, 0), target)
                elif self._me == target:
                    self._join(group.recv([token], source, 0), source)

    def _join(self, work: Work | None, peer: int) -> None:
        try:
            assert work is not None
            work.wait()
        except RuntimeError as error:
            raise self._failed("connecting the pipeline", peer, error) from error

    # --- transfers ----------------------------------------------------------------------------------------

    def send(self, action: Action, peer: int, tensors: Sequence[Tensor]) -> None:
        """Start to send; the tensors must not change until it has arrived."""
        group = self._groups.channel("up" if peer > self._me else "down")
        kept = [x.contiguous() for x in tensors]
        pending = PendingTransfer(action, peer, [], kept)
        try:
            for x in kept:
                pending.works.append(_started(group.send([x], peer, 0)))
                self._bytes += x.nbytes
        except RuntimeError as error:
            raise self._failed(action, peer, error) from error
        self._calls += len(kept)
        self._sends[action] = pending

    def post(self, action: Action, peer: int, buffers: list[Tensor]) -> PendingTransfer:
        """Start to receive into the buffers."""
        group = self._groups.channel("up" if peer < self._me else "down")
        try:
            works = [_started(group.recv([x], peer, 0)) for x in buffers]
        except RuntimeError as error:
            raise self._failed(action, peer, error) from error
        return PendingTransfer(action, peer, works, buffers)

    def wait(self, pending: PendingTransfer) -> list[Tensor]:
        """Until the transfer is done. Raises CollectiveError that names the action and the rank it waited for."""
        try:
            for work in pending.works:
                work.wait()
        except RuntimeError as error:
            raise self._failed(pending.action, pending.peer, error) from error
        return pending.tensors

    def arrived(self, actions: Iterable[Action]) -> None:
        """The other side has received these sends: let go of their tensors."""
        for action in actions:
            self.wait(self._sends.pop(action))

    def flush(self) -> None:
        """Until every send has arrived."""
        while self._sends:
            self.wait(self._sends.pop(next(iter(self._sends))))

    def clear(self) -> None:
        """Forget what a failed step has left."""
        self._sends.clear()

    def _failed(self, action: Action | str, peer: int, error: Exception) -> CollectiveError:
        rank = self._ranks[peer]
        return board().failed(f"{action} (pipeline, waits for rank {rank})", [rank], error)


def _started(work: Work | None) -> Work:
    assert work is not None, "a member of the group gets a handle"
    return work


def acknowledged(order: Order, rank: int) -> dict[Action, list[Action]]:
    """Receive of a rank -> sends of it that have arrived by then.

    A message of a peer tells that the peer has run what is ahead of it in its list, and so has received what that took.
    A gradient that comes back is the common case.
    """
    found: dict[Action, list[Action]] = {}
    for peer in {order.rank_of[a.peer] for a in order.ranks[rank] if a.kind in TRANSFERS}:
        waiting: dict[tuple[str, int, int, int], list[Action]] = {}
        taken: list[Action] = []
        for action in order.ranks[peer]:
            unit = (action.kind[-1 if action.kind in TRANSFERS else 0], action.stage, action.micro_batch, action.slice)
            if action.kind not in TRANSFERS:
                taken += waiting.pop(unit, [])
            elif order.rank_of[action.peer] == rank:
                if action.kind[0] == "R":
                    waiting.setdefault(unit, []).append(counterpart(action))
                else:
                    found[counterpart(action)] = taken
                    taken = []
    return found

"""Sends and receives along the pipeline axis: asynchronous, matched by order, failures explained, bytes counted.

Every link, a pair of ranks and a direction, has a process group of its own. NCCL has no tags, and a transfer keeps its
stream until the other end has come: in a group of more ranks, or for both directions, transfers that cross would wait
for each other (`autopar.schedule.order_checks`). Both ends list the transfers of a link in the same order
(`autopar.schedule.order_checks.check_channels`).

A send keeps its tensors until `arrived` says that the other side has them, at last until `flush`. gloo cannot be
polled (``is_completed`` turns true in ``wait`` only) and drops a send whose work nobody holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.traffic import Ledger, Traffic
from autopar.runtime.comm.step_notes import open_notes
from autopar.runtime.comm.wait_times import waiting
from autopar.runtime.fault.aborts import started
from autopar.runtime.fault.errors import explained
from autopar.runtime.mesh.process_groups import Groups
from autopar.schedule.order import Action
from autopar.schedule.order_checks import Link

AXIS = "pp"


@dataclass(slots=True)
class PendingTransfer:
    """A transfer on its way: its tensors, and what to wait for. ``peer``: coordinate of the other end."""

    action: Action
    peer: int
    works: list[dist.Work]
    tensors: list[Tensor]


class Channels:
    """The transfers of one rank. ``traffic``: sent so far. ``warms_up``: nothing is sent, zeros are received."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._ranks = groups.ranks(AXIS)
        self._me = groups.coordinate.get(AXIS, 0)
        self._sends: dict[Action, PendingTransfer] = {}
        self._calls = self._bytes = 0
        self.warms_up = False

    @property
    def traffic(self) -> Ledger:
        return {(AXIS, "send"): Traffic(self._calls, self._bytes)} if self._calls else {}

    def receiving(
        self, action: Action, peer: int, kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]
    ) -> Callable[[list[Any]], list[Any]]:
        """What starts to receive tensors of these shapes and dtypes; gives what `wait` takes."""
        device = self._groups.device
        return lambda _: [self.post(action, peer, [torch.empty(s, dtype=d, device=device) for s, d in kinds])]

    def sending(self, action: Action, peer: int) -> Callable[[list[Any]], list[Any]]:
        """What starts to send the tensors that it is given."""

        def start(tensors: list[Any]) -> list[Any]:
            self.send(action, peer, tensors)
            return []

        return start

    def connect(self, links: Iterable[Link]) -> None:
        """Make the groups of (sending, receiving) coordinates; all ranks give the same ones.

        gloo connects a group when it is made. NCCL connects it at its first transfer, and blocks until both ranks are
        there; in the midst of a schedule this could close a circle, so a byte goes over each link now.
        """
        links = set(links)
        self._groups.make_links(links)
        if self._groups.device.type == "cpu":
            return
        for source, target in side_by_side(links):
            if self._me in (source, target):
                started(self._words, "connecting the pipeline", target if self._me == source else source)
                group, place = self._groups.link(source, target)
                token = torch.zeros(1, dtype=torch.uint8, device=self._groups.device)
                start = group.send if self._me == source else group.recv
                with self._explained("connecting the pipeline", target if self._me == source else source):
                    _begun(start([token], place, 0)).wait()

    # --- transfers ----------------------------------------------------------------------------------------

    def send(self, action: Action, peer: int, tensors: Sequence[Tensor]) -> None:
        """Start to send; the tensors must not change until it has arrived."""
        if self.warms_up:
            self._sends[action] = PendingTransfer(action, peer, [], [])
            return
        started(self._words, action, peer)
        group, place = self._groups.link(self._me, peer)
        kept = [x.contiguous() for x in tensors]
        if (notes := open_notes()) is not None:
            notes.note(f"what {action} sends", kept)
        pending = PendingTransfer(action, peer, [], kept)
        with self._explained(action, peer):
            for x in kept:
                pending.works.append(_begun(group.send([x], place, 0)))
                self._bytes += x.nbytes
        self._calls += len(kept)
        self._sends[action] = pending

    def post(self, action: Action, peer: int, buffers: list[Tensor]) -> PendingTransfer:
        if self.warms_up:
            return PendingTransfer(action, peer, [], [x.zero_() for x in buffers])
        started(self._words, action, peer)
        group, place = self._groups.link(peer, self._me)
        with self._explained(action, peer):
            works = [_begun(group.recv([x], place, 0)) for x in buffers]
        return PendingTransfer(action, peer, works, buffers)

    def wait(self, pending: PendingTransfer) -> list[Tensor]:
        """Until the transfer is done. Raises CollectiveError that names the action and the rank it waited for."""
        action, peer = pending.action, pending.peer
        with self._explained(action, peer), waiting(AXIS):
            for work in pending.works:
                work.wait()
        if (notes := open_notes()) is not None:
            notes.note(f"what {pending.action} transfers", pending.tensors, received=True)
        return pending.tensors

    def arrived(self, actions: Iterable[Action]) -> None:
        """The other side has received these sends: let go of their tensors."""
        for action in actions:
            self.wait(self._sends.pop(action))

    def flush(self) -> None:
        while self._sends:
            self.wait(self._sends.pop(next(iter(self._sends))))

    def clear(self) -> None:
        self._sends.clear()

    def _explained(self, action: Action | str, peer: int) -> explained:
        return explained(self._words(action, peer), [self._ranks[peer]])

    def _words(self, action: Action | str, peer: int) -> str:
        return f"{action} (pipeline, waits for rank {self._ranks[peer]})"


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a member of the group gets a handle"
    return work


def side_by_side(links: Iterable[Link]) -> list[Link]:
    """The links in an order in which all ranks can go through those they are part of, as many at a time as possible: a
    chain of ranks in four turns, not one after the other."""
    turns: list[set[int]] = []  # the ranks at work in a turn
    found: list[tuple[int, Link]] = []
    for link in sorted(links):
        turn = next((i for i, busy in enumerate(turns) if not busy & set(link)), len(turns))
        if turn == len(turns):
            turns.append(set())
        turns[turn] |= set(link)
        found.append((turn, link))
    return [link for _, link in sorted(found)]

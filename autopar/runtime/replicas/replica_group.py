"""Sums over replicas: a process group of the same rank of each member, which is made anew whenever the members change.

gloo, also for tensors of a GPU, which go through host memory: its waits can be ended when a member is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.adapters.distributed import gloo_group, is_backend_error, own_client
from autopar.ir.signature import in_buckets
from autopar.runtime.fault import aborts
from autopar.runtime.fault.store_client import Answer
from autopar.runtime.replicas.lookout import Lookout
from autopar.runtime.replicas.membership import Record

LOOK = 0.05  # seconds between two looks at a group that is being made


class MemberLost(Exception):
    """An exchange with the other replicas did not end: the members agree on who is left."""


@dataclass
class _Connection:
    """The group of one epoch. ended: set once waits in it must end. sockets: see `aborts.recorded`."""

    record: Record
    ended: threading.Event = field(default_factory=threading.Event)
    sockets: dict[int, int] = field(default_factory=dict)
    group: Any = None  # None for one member

    def end(self, store_port: int) -> None:
        self.ended.set()
        aborts.shut_down(self.sockets, store_port)


class ReplicaGroup:
    """The groups over replicas, of this rank as ``rank`` of its replica ``index``, one after another."""

    def __init__(self, store: dist.Store, port: int, index: int, rank: int, timeout: timedelta) -> None:
        self._store, self._port, self._index, self._rank, self._timeout = store, port, index, rank, timeout
        self._now: _Connection | None = None

    @property
    def epoch(self) -> int:
        """Of the group that is connected; -1: none is."""
        return self._now.record.epoch if self._now is not None and not self._now.ended.is_set() else -1

    def end(self) -> None:
        """End the group: whatever waits in it raises, here and on the other members."""
        if (now := self._now) is not None:
            now.end(self._port)

    def close(self) -> None:
        """End the group, and free it while the program still runs."""
        self.end()
        self._now = None

    def trouble(self, epoch: int) -> None:
        """A member of an epoch is lost, or the epoch is over. Called from another thread."""
        if (now := self._now) is not None and now.record.epoch == epoch:
            now.end(self._port)

    def connect(self, record: Record, lookout: Lookout) -> None:
        """Make the group of an epoch. Raises MemberLost once it is known that a member will not come."""
        if self._now is not None and self._now.record.epoch == record.epoch:
            raise MemberLost  # it was ended: the epoch is over
        self.end()
        self._now = now = _Connection(record)
        lookout.watch(record, record.members.values())
        if len(record.members) == 1:
            return
        store = dist.PrefixStore(f"group/{record.epoch}/{self._rank}", self._store)

        def make() -> Any:
            with aborts.recorded(now.sockets):
                place = record.order.index(self._index)
                return gloo_group(own_client(store), place, len(record.members), self._timeout)

        answer = Answer()
        threading.Thread(target=answer.run, args=(make,), name="autopar-replica-group", daemon=True).start()
        while not answer.wait(LOOK):
            if now.ended.is_set():
                raise MemberLost
        if answer.error is not None:
            raise _translated(answer.error)
        now.group = answer.value
        if now.ended.is_set():
            raise MemberLost

    def add_up(self, tensors: Sequence[Tensor], bucket_bytes: int) -> None:
        """Sum tensors over the members, in place: in buckets of one dtype. Raises MemberLost."""
        assert self._now is not None, "connected"
        if self._now.group is None:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for x in tensors:
            by_dtype.setdefault(x.dtype, []).append(x)
        for alike in by_dtype.values():
            for bucket in in_buckets([x.nbytes for x in alike], bucket_bytes):
                self._add_up([alike[i] for i in bucket])

    def _add_up(self, bucket: Sequence[Tensor]) -> None:
        flat = torch.cat([x.reshape(-1).to(_summed_in(x.dtype)).cpu() for x in bucket])
        assert self._now is not None, "connected"
        try:
            self._now.group.allreduce([flat]).wait()
        except RuntimeError as error:
            raise _translated(error) from error
        for x, total in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
            x.copy_(total.view(x.shape))

    def send(self, x: Tensor, index: int) -> None:
        """Send a tensor of the host to the member ``index``. Raises MemberLost."""
        self._move("send", x, index)

    def receive(self, x: Tensor, index: int) -> None:
        """Fill a tensor of the host with what the member ``index`` sends. Raises MemberLost."""
        self._move("recv", x, index)

    def _move(self, way: str, x: Tensor, index: int) -> None:
        assert self._now is not None, "connected"
        if x.numel():
            try:
                getattr(self._now.group, way)([x], self._now.record.order.index(index), 0).wait()
            except RuntimeError as error:
                raise _translated(error) from error


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: 16-bit floats are added in float32."""
    wide = torch.float32 if dtype.is_floating_point else torch.uint8
    return torch.promote_types(dtype, wide)


def _translated(error: BaseException) -> BaseException:
    return MemberLost(str(error)) if isinstance(error, RuntimeError) and is_backend_error(error) else error

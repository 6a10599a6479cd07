"""Ranks publish how they spend their time with their heartbeats; the first one warns of those that are slow.

Reading and publishing is up to the heartbeat's thread, so it costs the training loop nothing, and nobody waits.
"""

from __future__ import annotations

import logging
import resource
import socket
import sys
import time
import weakref
from dataclasses import replace

import torch
import torch.distributed as dist

from autopar.runtime.fault.errors import board
from autopar.runtime.fault.store_client import look
from autopar.runtime.health.slow_ranks import Health
from autopar.runtime.health.step_times import WINDOW, RankTimes, StepTimes
from autopar.runtime.mesh.process_groups import Groups

log = logging.getLogger("autopar.health")

EVERY = 5.0  # seconds between two publications
FULL = 0.9  # share of the window that a rank must have run before it is warned of


class HealthWatch:
    """The times of the steps of one model on this rank, and what the other ranks publish of theirs."""

    def __init__(self, groups: Groups) -> None:
        self.times = StepTimes()
        self._groups, self._host = groups, socket.gethostname()
        self._key = f"health/{groups.name}"
        self._next = 0.0
        self._warned: set[int] = set()
        mine = board()
        if mine.heartbeat is not None:
            mine.heartbeat.tasks.append(weakref.WeakMethod(self._beat))

    def read(self) -> Health:
        """What all ranks have published last, this one just now. Not collective."""
        mine = board()
        if mine.heartbeat is None:
            return Health([self._own()])
        return mine.whole.line.ask(self._read)

    def _own(self) -> RankTimes:
        found = self.times.last_minute(self._groups.rank, self._groups.coordinate, self._host)
        return replace(found, peak_memory=_peak_memory(self._groups.device))

    def _read(self, store: dist.Store) -> Health:
        texts = (look(store, self._of(rank)) for rank in range(self._groups.mesh.world_size))
        ranks = {one.rank: one for one in map(RankTimes.from_text, filter(None, texts))}
        return Health([one for _, one in sorted((ranks | {self._groups.rank: self._own()}).items())])

    def _of(self, rank: int) -> str:
        mine = board()
        return f"{mine.whole.keys}/{self._key}/{mine.first + rank}"

    def _beat(self, store: dist.Store) -> None:
        """After a heartbeat."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY
        own = self._own()
        if own.calls:
            store.set(self._of(own.rank), own.text())
            if own.rank == 0:
                self._warn(self._read(store))

    def _warn(self, health: Health) -> None:
        """Once for each rank that was slow for a minute, and again after it was not."""
        slow, full = health.slow, {one.rank for one in health.ranks if one.seconds >= FULL * WINDOW}
        for rank in sorted(slow.keys() & full - self._warned):
            host = next(one.host for one in health.ranks if one.rank == rank)
            log.warning("health: rank %d (%s) %s, for a minute", rank, host, slow[rank])
        self._warned = slow.keys() & (full | self._warned)


def _peak_memory(device: torch.device) -> int:
    """Most bytes allocated on a GPU, or held by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

"""How this rank has spent the last minute: computing, waiting for others by axis, and outside of steps.

A step of a shape is one ``kind`` of call. Its computing time is the lower quartile over the calls of the kind: what
disturbs a call (a garbage collection, a page fault, another process) only makes it longer, and a slow chip makes all
of them longer. What is compared between ranks is that of the same kind.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from autopar.runtime.comm.wait_times import Record, Spent, recording

WINDOW = 60.0  # seconds that count
WARM_UP = 3  # first calls of a kind that do not count: kernels are loaded, memory is allocated
EARLY = 20  # calls after these are what later ones are compared with where no other rank does the same
SAMPLED = 8  # on GPUs one call of a kind in so many is measured: events cost some microseconds each
KINDS = 16  # that a rank publishes, those that took longest


@dataclass(frozen=True)
class Calls:
    """Of one kind: how many within the window, the lower quartile of their computing in seconds, and that of the first
    ones (None: too few so far)."""

    count: int
    computing: float
    early: float | None


@dataclass(frozen=True)
class RankTimes:
    """The last minute of one rank. ``place``: its coordinate on the mesh. ``seconds``: how long it was, of which the
    rank spent ``computing`` and ``waiting`` (by axis) within steps; the rest is outside of them: data, optimizer,
    logs. ``kinds``: of the computing. ``peak_memory``: most bytes on the device since the start."""

    rank: int
    place: Mapping[str, int]
    host: str
    calls: int = 0
    seconds: float = 0.0
    computing: float = 0.0
    waiting: Mapping[str, float] = field(default_factory=dict)
    kinds: Mapping[str, Calls] = field(default_factory=dict)
    peak_memory: int = 0

    def __str__(self) -> str:
        at = ", ".join([*(f"{axis}={i}" for axis, i in self.place.items()), self.host])
        return f"rank {self.rank} ({at})"

    def spent(self) -> dict[str, float]:
        """Seconds by what they were spent on; none if no step has run."""
        waited = sum(self.waiting.values())
        waiting = {f"waiting for {axis}": self.waiting[axis] for axis in sorted(self.waiting)}
        outside = max(0.0, self.seconds - self.computing - waited)
        return {"computing": self.computing, **waiting, "outside of steps": outside} if self.calls else {}

    def text(self) -> str:
        """What `from_text` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> RankTimes:
        given: dict[str, Any] = json.loads(text)
        given["kinds"] = {name: Calls(**of_kind) for name, of_kind in given["kinds"].items()}
        return cls(**given)


class StepTimes:
    """The steps of one model on this rank. ``clock``: seconds. Another thread reads them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pending: deque[tuple[str, Record]] = deque()  # whose times a GPU does not know yet
        self._recent: deque[tuple[float, str, Spent]] = deque()
        self._begun: Counter[str] = Counter()
        self._seen: Counter[str] = Counter()
        self._early: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def step(self, kind: str, device: torch.device) -> Iterator[None]:
        """Context manager: a step runs."""
        self._begun[kind] += 1
        if device.type != "cpu" and self._begun[kind] % SAMPLED:
            yield
            return
        with recording(device) as record:
            yield
        self.add(kind, record)

    def add(self, kind: str, record: Record) -> None:
        """A step has run."""
        with self._lock:
            self._pending.append((kind, record))
            while self._pending and (spent := self._pending[0][1].spent()) is not None:
                self._count(self._pending.popleft()[0], spent)

    def _count(self, kind: str, spent: Spent) -> None:
        self._seen[kind] += 1
        if self._seen[kind] <= WARM_UP:
            return
        early = self._early.setdefault(kind, [])
        if len(early) < EARLY:
            early.append(spent.computing)
        self._recent.append((self._clock(), kind, spent))

    def last_minute(self, rank: int, place: Mapping[str, int], host: str) -> RankTimes:
        """The calls within `WINDOW` seconds."""
        with self._lock:
            now = self._clock()
            while self._recent and self._recent[0][0] < now - WINDOW:
                self._recent.popleft()
            found = list(self._recent)
        if not found:
            return RankTimes(rank, place, host)
        waiting: Counter[str] = Counter()
        by_kind: dict[str, list[float]] = {}
        for _, kind, spent in found:
            waiting.update(spent.waited)
            by_kind.setdefault(kind, []).append(spent.computing)
        longest = sorted(by_kind, key=lambda kind: -sum(by_kind[kind]))[:KINDS]
        kinds = {k: Calls(len(by_kind[k]), _lower_quartile(by_kind[k]), self._early_of(k)) for k in longest}
        first, _, spent = found[0]
        seconds = found[-1][0] - first + spent.seconds
        computing = sum(spent.computing for _, _, spent in found)
        return RankTimes(rank, place, host, len(found), seconds, computing, dict(waiting), kinds)

    def _early_of(self, kind: str) -> float | None:
        early = self._early.get(kind, [])
        return _lower_quartile(early) if len(early) == EARLY else None


def _lower_quartile(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else seconds[0]

"""How long this rank waits for others within a step, by axis of the mesh: the rest of the step is its own computing.

    with recording(device) as record:            # a step
        with waiting("tp"): work.wait()          # every wait of a collective or a transfer
    record.spent()                               # Spent(seconds=1.9, waited={"tp": 0.2}), or None: not known yet

On the CPU a wait blocks the thread, and is measured by its clock. On a GPU it blocks the stream of the computation
(``torch.distributed.Work.wait``), so it is the time between two events of this stream, known once the stream has passed
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch


@dataclass(frozen=True)
class Spent:
    """``seconds`` of a step, and how many of them this rank ``waited`` for others, by axis."""

    seconds: float
    waited: dict[str, float]

    @property
    def computing(self) -> float:
        """Seconds that this rank did not wait."""
        return self.seconds - sum(self.waited.values())


@dataclass
class Record:
    """The marks of a step: of its start and end, and of (axis, start, end) of its waits. ``mark`` makes one."""

    mark: Callable[[], Any]
    start: Any
    end: Any = None
    waits: list[tuple[str, Any, Any]] = field(default_factory=list)

    def spent(self) -> Spent | None:
        """None while the device has not passed the end."""
        if isinstance(self.end, torch.cuda.Event) and not self.end.query():
            return None
        waited: dict[str, float] = {}
        for axis, start, end in self.waits:
            waited[axis] = waited.get(axis, 0.0) + _between(start, end)
        return Spent(_between(self.start, self.end), waited)


def _between(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


_open: list[Record] = []  # of the step that runs; ranks run one at a time


@contextmanager
def recording(device: torch.device) -> Iterator[Record]:
    """Context manager: notes all waits inside."""
    mark: Callable[[], Any] = time.perf_counter if device.type == "cpu" else _event
    record = Record(mark, mark())
    _open.append(record)
    try:
        yield record
    finally:
        _open.remove(record)
        record.end = mark()


class waiting:
    """Context manager: notes a wait for ranks along ``axis``. A class, since there are hundreds in a step."""

    __slots__ = ("_axis", "_record", "_start")

    def __init__(self, axis: str) -> None:
        self._axis = axis

    def __enter__(self) -> None:
        self._record = _open[-1] if _open else None
        if self._record is not None:
            self._start = self._record.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._record is not None:
            self._record.waits.append((self._axis, self._start, self._record.mark()))

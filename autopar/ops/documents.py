"""Where the documents of packed rows lie: read once from ``segments``, then known as numbers.

    segments [[0, 0, 0, 1, 1, 2]]   -->   runs (0-2, 3-4, 5) of the one example

Attention is computed from run to run, and ranks that share a sequence send what a run of another rank needs. So the
runs are data of a step: every rank of the sequence holds all segments and derives the same ones.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

SHORT = 64  # tokens: shorter neighbours are computed together, with a mask; a call for each would cost more
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """Positions [start, stop) that attend to nothing outside. mixed: several documents, which a mask tells apart."""

    start: int
    stop: int
    mixed: bool = False

    def __len__(self) -> int:
        return self.stop - self.start


Runs = tuple[Run, ...]


@dataclass(frozen=True, eq=False)
class Documents:
    """Packed documents, per example and in order of position.

    runs: as short as possible. blocks: what is computed at once, runs or neighbouring short ones. Compared by identity:
    all layers of a step share one, and what is derived from it is kept with it (`once`).
    """

    runs: tuple[Runs, ...]
    blocks: tuple[Runs, ...]
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, segments: Sequence[Sequence[int]]) -> Documents:
        """The documents of segment numbers, one sequence of equal length per example."""
        runs = tuple(tuple(_runs(example)) for example in segments)
        return cls(runs, tuple(_joined(mine) for mine in runs))

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of_lengths(cls, lengths: tuple[int, ...]) -> Documents:
        """Documents of these lengths, one after the other, in one example that stands for all."""
        ends = itertools.accumulate(lengths, initial=0)
        runs = tuple(Run(*both) for both in itertools.pairwise(ends))
        return cls((runs,), (_joined(runs),))

    @property
    def alike(self) -> bool:
        """Whether all examples are computed in the same blocks."""
        return all(mine == self.blocks[0] for mine in self.blocks)

    def by_example(self) -> Iterator[tuple[int | None, Runs]]:
        """(example, its blocks); None once for all of them, if they are alike."""
        yield from [(None, self.blocks[0])] if self.alike else enumerate(self.blocks)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returned when it was first called for this key."""
        if key not in self._derived:
            self._derived[key] = make()
        found: T = self._derived[key]
        return found


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # segments -> (version, documents)


def documents_of(segments: Tensor | None, assumed: tuple[int, ...] = ()) -> Documents | None:
    """The documents of segments [B, S]; None where they cannot be read: while a CUDA graph is recorded, whose replays
    would not read them again. Without data (an estimate) they have the ``assumed`` lengths, or are unknown: None.

    On an accelerator reading synchronizes, once for a tensor and not once for each layer.
    """
    if segments is None or not segments.numel():
        return None
    if segments.is_meta:
        return Documents.of_lengths(assumed) if assumed else None
    if segments.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if segments.is_inference():  # has no version
        return _read(segments)
    version, found = _known.get(segments, (-1, None))
    if version != segments._version:
        found = _read(segments)
        _known[segments] = (segments._version, found)
    return found


def _read(segments: Tensor) -> Documents:
    once = segments[:1] if segments.stride(0) == 0 else segments
    return Documents.of(once.tolist())


def _runs(segments: Sequence[int]) -> Iterator[Run]:
    """Runs of equal numbers; where a number comes back, all from its first to its last position is one run."""
    parts: list[tuple[int, int, int]] = []  # number, start, stop
    stop = 0
    for number, group in itertools.groupby(segments):
        start, stop = stop, stop + len(list(group))
        parts.append((number, start, stop))
    last = {number: stop for number, _, stop in parts}
    first, reach, numbers = 0, 0, 0
    for number, _, stop in parts:
        reach, numbers = max(reach, last[number]), numbers + 1
        if stop == reach:
            yield Run(first, stop, mixed=numbers > 1)
            first, numbers = stop, 0


def _joined(runs: Sequence[Run]) -> Runs:
    """Neighbours joined up to a length of `SHORT`."""
    found: list[Run] = []
    for run in runs:
        if found and run.stop - found[-1].start <= SHORT:
            run = Run(found.pop().start, run.stop, mixed=True)
        found.append(run)
    return tuple(found)

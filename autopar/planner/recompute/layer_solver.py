"""Which way each layer takes, so that the least is made again under a limit of bytes.

Layers run forward one after another, and backward in the opposite order. In layer i a rank holds what the layers before
it have saved, and what is alive within it (`RecomputeOption`); of other microbatches in flight, all that a part saves:

    copies * saved(all) + saved(< i) + alive in F or B of i   <=   limit          for every i

A dynamic program over the layers in order keeps, for each number of bytes saved so far, the least time. With copies,
it runs once for each of several shares of the limit that other microbatches may take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

STATES = 1024  # numbers of bytes that are told apart
SHARES = 24  # of the limit, for other microbatches
NEAR = 1e-3  # of the least bytes


@dataclass(frozen=True)
class RecomputeOption:
    """One way for a layer. saved: bytes kept from its F to its B. seconds: of what B makes again, and that it waits for
    copies. forward, backward: most bytes alive in its F and B, with its own saved ones, without what the layers before
    it have saved. left: where the backward comes in two, bytes that B leaves for W. host: bytes kept in host memory."""

    saved: int
    seconds: float
    forward: int
    backward: int
    left: int = 0
    host: int = 0

    def within(self, forward: int, backward: int) -> RecomputeOption:
        """Where further bytes live across its F and its B."""
        return replace(self, forward=self.forward + forward, backward=self.backward + backward)

    @property
    def alive(self) -> int:
        """In the worse of the two."""
        return max(self.forward, self.backward)


@dataclass(frozen=True)
class MemoryBudget:
    """What a part may hold at a moment: ``bytes``, less ``copies`` of all that it saves, for ``share`` of a microbatch
    that runs."""

    bytes: float
    copies: float = 0.0
    share: float = 1.0

    def beside(self, total: float) -> float:
        """For the microbatch that runs, if each saves ``total``."""
        return (self.bytes - self.copies * total) / self.share

    def taken(self, total: float, alive: float) -> float:
        """Of all saved and of what is alive."""
        return self.copies * total + self.share * alive


def least_time(
    layers: Sequence[Sequence[RecomputeOption]], rooms: Sequence[MemoryBudget], most: float = math.inf
) -> list[int] | None:
    """Number of a way for each layer, with the least seconds in all; None where no choice fits all of ``rooms``.
    ``most``: bytes that all layers may save together."""
    if not any(room.copies for room in rooms):
        room = min((room.beside(0.0) for room in rooms), default=math.inf)
        return _program(layers, room, min(most, room))[1]
    best, chosen = math.inf, None
    floor = sum(min(w.saved for w in ways) for ways in layers)
    ceiling = min(most, sum(max(w.saved for w in ways) for ways in layers))
    ceiling = min([ceiling, *(room.bytes / room.copies for room in rooms if room.copies)])
    for total in np.linspace(floor, max(ceiling, floor), SHARES):
        seconds, found = _program(layers, min(room.beside(total) for room in rooms), min(total, most))
        if found is not None and seconds < best:
            best, chosen = seconds, found
    return chosen


def least_bytes(layers: Sequence[Sequence[RecomputeOption]], rooms: Sequence[MemoryBudget]) -> list[int]:
    """The way for each layer with which the fullest of the moments, whose ``bytes`` do not count, is as small as can
    be: where this does not fit, nothing does."""

    def fullest(choice: Sequence[int]) -> float:
        total, alive = saved_by(layers, choice), alive_by(layers, choice)
        return max(room.taken(total, alive) for room in rooms)

    smallest = [min(range(len(w)), key=lambda k, w=w: (w[k].saved, w[k].alive)) for w in layers]  # type: ignore[misc]
    chosen = min([[0] * len(layers), smallest], key=fullest)
    low, high = 0.0, fullest(chosen)
    while high - low > NEAR * high:
        middle = (low + high) / 2
        found = least_time(layers, [replace(room, bytes=middle) for room in rooms])
        if found is None:
            low = middle
        else:
            chosen, high = found, min(fullest(found), middle)
    return chosen


def alive_by(layers: Sequence[Sequence[RecomputeOption]], choice: Sequence[int]) -> int:
    """Most bytes of the microbatch that runs: in F and B with what the layers before have saved, in B with what those
    behind leave for W. What the layer before one has in host memory is still there in its F, and there again in its
    B: copies are made beside one layer."""
    before = most = moving = 0
    behind = left_by(layers, choice)
    for ways, k in zip(layers, choice, strict=True):
        way = ways[k]
        behind -= way.left
        most = max(most, before + moving + way.forward, before + moving + way.backward + behind)
        before, moving = before + way.saved, way.host
    return most


def saved_by(layers: Sequence[Sequence[RecomputeOption]], choice: Sequence[int]) -> int:
    """Bytes of one microbatch from F to B."""
    return sum(ways[k].saved for ways, k in zip(layers, choice, strict=True))


def left_by(layers: Sequence[Sequence[RecomputeOption]], choice: Sequence[int]) -> int:
    """Bytes of one microbatch from B to W."""
    return sum(ways[k].left for ways, k in zip(layers, choice, strict=True))


def hosted_by(layers: Sequence[Sequence[RecomputeOption]], choice: Sequence[int]) -> int:
    """Bytes of one microbatch in host memory."""
    return sum(ways[k].host for ways, k in zip(layers, choice, strict=True))


def _program(layers: Sequence[Sequence[RecomputeOption]], room: float, most: float) -> tuple[float, list[int] | None]:
    """(seconds, way of each layer); None where none fits."""
    saved, seconds = np.zeros(1), np.zeros(1)
    steps: list[tuple[Any, Any]] = []
    for ways in layers:
        own, time, alive = (np.array([getattr(w, f) for w in ways]) for f in ("saved", "seconds", "alive"))
        if steps:  # as much as the layer before has there, if it is equal
            alive = alive + np.array([w.host for w in ways])
        total, spent = saved[:, None] + own, seconds[:, None] + time
        state, way = np.nonzero((saved[:, None] + alive <= room) & (total <= most))
        if not state.size:
            return math.inf, None
        kept = _least_of_each(total[state, way], spent[state, way], room)
        state, way = state[kept], way[kept]
        saved, seconds = total[state, way], spent[state, way]
        steps.append((state, way))
    at = int(seconds.argmin())
    found, choice = float(seconds[at]), []
    for state, way in reversed(steps):
        choice.append(int(way[at]))
        at = int(state[at])
    return found, choice[::-1]


def _least_of_each(saved: Any, seconds: Any, room: float) -> Any:
    """Numbers of the states that none beats in both; of those with nearly the same bytes the fastest."""
    order = np.lexsort((seconds, saved))
    best = np.minimum.accumulate(seconds[order])
    first = np.concatenate([[True], best[1:] < best[:-1]])
    order = order[first]
    if len(order) <= STATES:
        return order
    bucket = np.floor(saved[order] * (STATES / max(room, 1.0)))
    last = np.concatenate([bucket[1:] != bucket[:-1], [True]])  # more bytes, less time
    return order[last]

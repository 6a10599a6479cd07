"""Which way each layer takes, so that the least is made again under a limit of bytes.

Layers run forward one after another, and backward in the opposite order. In layer i a rank holds what the layers before
it have saved, and what is alive within it (`RecomputeOption`); of other microbatches in flight, all that a part saves:

    copies * saved(all) + saved(< i) + alive in F or B of i   <=   limit          for every i

A dynamic program over the layers in order keeps, for each number of bytes saved so far, the least time. With copies,
it runs once for each of several shares of the limit that other microbatches may take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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


# --- ways of one layer ---------------------------------------------------------------------------------

WEIGHTS = (0.0, 0.25)
VERTICES = 10  # of a hull
BETWEEN = 6  # integer programs
SAME = 1e-6  # of all bytes, or of all time: no difference
BRANCHES = 300  # of an integer program, and no seconds: all ranks must find the same


@dataclass(frozen=True)
class RecomputableValue:
    """seconds: to make it. bytes: of its storage; 0: it cannot be saved (several results). pinned: it is not made
    again. operands: numbers of values."""

    seconds: float
    bytes: int
    pinned: bool = False
    operands: tuple[int, ...] = ()


def ways(values: Sequence[RecomputableValue], wanted: Sequence[int]) -> list[frozenset[int]]:
    """Sets of values to make again, from none to all that may be; each is one that no other beats in both (bytes,
    time), as far as they were looked for.

    x is a forward value with time t_x to make it and b_x bytes; W what the backward takes. s_x: it is saved, r_x: the
    backward makes it again.

        min  sum t_x r_x + price * sum b_x (s_x + weight * r_x)
        s_x + r_x >= 1            x in W
        s_u + r_u >= r_x          u an operand of x

    Every constraint is a difference of the two unknowns a_x = s_x + r_x and r_x, so the linear program is a minimum cut
    and its solutions are whole numbers. Raising the price walks along the lower hull of (bytes, time). ``weight``
    counts values that are made again, which live together for a while. Between far vertices of the hull integer
    programs with a bound on the bytes find more (HiGHS, by scipy).
    """
    if not wanted:
        return [frozenset()]
    program = _CutProgram(values, wanted)
    found: dict[frozenset[int], tuple[float, float]] = {}
    for weight in WEIGHTS:
        for way in program.hull(weight):
            found[way] = program.costs(way)
    for way in program.between(sorted(found.values())):
        found[way] = program.costs(way)
    return list(found)


class _CutProgram:
    """The program of one layer, in shares of all its bytes and of all its time."""

    def __init__(self, values: Sequence[RecomputableValue], wanted: Sequence[int]) -> None:
        self.values, self.wanted = values, wanted
        self.time, self.size = (np.array([getattr(v, f) for v in values], float) for f in ("seconds", "bytes"))
        self.time /= self.time.sum() or 1.0
        self.size /= self.size.sum() or 1.0
        self.rows, self.least = self._constraints()
        self.most = np.concatenate([self.size > 0, [not v.pinned for v in values]]).astype(float)

    def _constraints(self) -> tuple[Any, Any]:
        """Rows over (s, r), and what each is at least."""
        from scipy.sparse import csr_array

        n = len(self.values)
        entries = [(k, i, 1.0) for k, x in enumerate(self.wanted) for i in (x, n + x)]
        pairs = [(x, u) for x, value in enumerate(self.values) for u in dict.fromkeys(value.operands)]
        for k, (x, u) in enumerate(pairs, len(self.wanted)):
            entries += [(k, u, 1.0), (k, n + u, 1.0), (k, n + x, -1.0)]
        at, column, factor = zip(*entries, strict=True)
        count = len(self.wanted) + len(pairs)
        least = np.concatenate([np.ones(len(self.wanted)), np.zeros(len(pairs))])
        return csr_array((factor, (at, column)), shape=(count, 2 * n)), least

    def solve(self, costs: Any, bytes_at_most: float | None = None) -> frozenset[int] | None:
        """What is made again in the cheapest way; None where there is none."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        rules = [LinearConstraint(self.rows, lb=self.least)]
        whole = bytes_at_most is not None
        if whole:
            rules.append(LinearConstraint(np.concatenate([self.size, 0 * self.size])[None, :], ub=bytes_at_most))
        options = {"node_limit": BRANCHES} if whole else {}
        found = milp(
            costs, integrality=np.full(len(costs), int(whole)), bounds=Bounds(0, self.most), constraints=rules,
            options=options,
        )  # fmt: skip
        if found.x is None:
            return None
        return frozenset(np.flatnonzero(found.x[len(self.values) :] > 0.5).tolist())

    def at(self, price: float, weight: float, by_time: float = 1.0) -> frozenset[int]:
        """The cheapest way at a price of bytes."""
        found = self.solve(
            np.concatenate([price * self.size, by_time * self.time + price * weight * self.size + SAME / 100])
        )
        assert found is not None, "saving everything that is wanted is always possible"
        return found

    def costs(self, way: frozenset[int]) -> tuple[float, float]:
        """(bytes that are saved, time of what is made again), with what no one asks for left out."""
        seen: set[int] = set()
        queue, size, time = list(self.wanted), 0.0, 0.0
        while queue:
            x = queue.pop()
            if x in seen:
                continue
            seen.add(x)
            if x in way:
                time += self.time[x]
                queue += self.values[x].operands
            else:
                size += self.size[x]
        return float(size), float(time)

    def hull(self, weight: float) -> Iterator[frozenset[int]]:
        """Vertices of the lower hull: of the two ends, then of what lies farthest below the line between two."""
        ends = [self.at(SAME, weight), self.at(1.0, weight, SAME)]
        yield from ends
        queue = [tuple(map(self.costs, ends))]
        for _ in range(VERTICES):
            if not queue:
                return
            left, right = queue.pop(0)
            saved, lost = left[0] - right[0], right[1] - left[1]
            if saved < SAME or lost < SAME:
                continue
            way = self.at(lost / saved, weight)
            new = self.costs(way)
            if new[1] + lost / saved * new[0] < left[1] + lost / saved * left[0] - SAME:
                yield way
                queue += [(left, new), (new, right)]

    def between(self, points: Sequence[tuple[float, float]]) -> Iterator[frozenset[int]]:
        """The least time for bytes in the middle of the widest gaps."""
        gaps = sorted(pairwise(points), key=lambda pair: (pair[0][0] - pair[1][0]) * abs(pair[0][1] - pair[1][1]))
        for (low, _), (high, _) in gaps[:BETWEEN]:
            if high - low < SAME:
                continue
            way = self.solve(np.concatenate([SAME * self.size, self.time]), (low + high) / 2)
            if way is not None:
                yield way

"""What each layer saves and recomputes, such that recomputation takes least time under a memory limit.

Layers run forward one after another, and backward in the opposite order. In layer i a rank holds what the layers before
it have saved, what is alive within it (`RecomputeOption`), and all that the stage saves for each other microbatch in
flight:

    copies * saved(all) + saved(< i) + alive in F or B of i   <=   limit          for every i

A dynamic program over the layers keeps the least time for each number of bytes saved so far. With copies, it runs once
for each of several shares of the limit that other microbatches may take.

A *way* of a layer is one `RecomputeOption`: a set of values to recompute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

STATES = 1024  # numbers of bytes that the program distinguishes
SHARES = 24  # of the limit, for other microbatches
NEAR = 1e-3  # of the least bytes


@dataclass(frozen=True)
class RecomputeOption:
    """One way for a layer. saved: bytes kept from its F to its B. seconds: of recomputation in B, and of waiting for
    copies from the host. forward, backward: peak bytes in its F and B, including what it saves itself, without what the
    layers before it have saved. left: bytes that B leaves for W, if the backward is split. host: bytes kept in host
    memory."""

    saved: int
    seconds: float
    forward: int
    backward: int
    left: int = 0
    host: int = 0

    def within(self, forward: int, backward: int) -> RecomputeOption:
        """The same with further bytes alive during its F and its B."""
        return replace(self, forward=self.forward + forward, backward=self.backward + backward)

    @property
    def alive(self) -> int:
        """Peak bytes: the greater of the two."""
        return max(self.forward, self.backward)


@dataclass(frozen=True)
class MemoryBudget:
    """What a stage may hold at a moment: ``bytes``, of which other microbatches take ``copies`` times all that it
    saves; the rest is for the microbatch that runs, or a ``share`` of it (a token slice)."""

    bytes: float
    copies: float = 0.0
    share: float = 1.0

    def beside(self, total: float) -> float:
        """Bytes for the microbatch that runs, if every microbatch saves ``total``."""
        return (self.bytes - self.copies * total) / self.share

    def taken(self, total: float, alive: float) -> float:
        """Bytes in use, for bytes that each microbatch saves and peak bytes of the one that runs."""
        return self.copies * total + self.share * alive


def least_time(
    layers: Sequence[Sequence[RecomputeOption]], rooms: Sequence[MemoryBudget], most: float = math.inf
) -> list[int] | None:
    """Number of the way of each layer, with the least total seconds; None if no choice fits all of ``rooms``. ``most``:
    bytes that all layers may save together."""
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
    """The way for each layer that minimises the bytes at the fullest moment (the ``bytes`` of ``rooms`` are ignored).
    If this does not fit, nothing does."""

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
    """Peak bytes of the microbatch that runs: in F and B with what earlier layers have saved, in B also with what later
    layers leave for W. Copies to and from the host overlap with the next layer, so what a layer offloads is still on
    the device in the F of the next layer, and back there in its B."""
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
        if steps:  # what the layer before offloads, if it takes an equal way
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
    """Indices of the Pareto-optimal states; of those with nearly the same bytes the fastest."""
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
    """seconds: to compute it. bytes: of its storage; 0: it cannot be saved (several results). pinned: it is not
    recomputed. operands: indices of values."""

    seconds: float
    bytes: int
    pinned: bool = False
    operands: tuple[int, ...] = ()


def ways(values: Sequence[RecomputableValue], wanted: Sequence[int]) -> list[frozenset[int]]:
    """Sets of values to recompute, from none to all that may be, Pareto-optimal in (bytes, time) among those that the
    search has found.

    x is a forward value that takes t_x to compute and has b_x bytes; W are the values that the backward reads. s_x: x
    is saved; r_x: the backward recomputes x.

        min  sum t_x r_x + price * sum b_x (s_x + weight * r_x)
        s_x + r_x >= 1            x in W
        s_u + r_u >= r_x          u an operand of x

    Every constraint is a difference of the two unknowns a_x = s_x + r_x and r_x, so the linear program is a minimum cut
    and its solutions are integers. Raising the price walks along the lower hull of (bytes, time). ``weight`` counts the
    memory of recomputed values, which are alive at the same time for a while. Between distant vertices of the hull,
    integer programs with a bound on the bytes find more (HiGHS, by scipy).
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


def cheapest_way(
    values: Sequence[RecomputableValue], wanted: Sequence[int], keeping: Sequence[float]
) -> frozenset[int]:
    """The set of values to recompute with the least time, ``keeping`` that of each saved value included."""
    costs = np.array([*keeping, *(value.seconds for value in values)])
    if not wanted or not costs.any():
        return frozenset()
    found = _CutProgram(values, wanted).solve(costs / costs.max())
    assert found is not None, "saving everything that is wanted is always possible"
    return found


class _CutProgram:
    """The program of one layer, with bytes and times relative to their totals."""

    def __init__(self, values: Sequence[RecomputableValue], wanted: Sequence[int]) -> None:
        self.values, self.wanted = values, wanted
        self.time, self.size = (np.array([getattr(v, f) for v in values], float) for f in ("seconds", "bytes"))
        self.time /= self.time.sum() or 1.0
        self.size /= self.size.sum() or 1.0
        self.rows, self.least = self._constraints()
        self.most = np.concatenate([self.size > 0, [not v.pinned for v in values]]).astype(float)

    def _constraints(self) -> tuple[Any, Any]:
        """(rows over (s, r), lower bound of each)."""
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
        """The values that the cheapest way recomputes; None if there is no way."""
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
        """(bytes saved, time of recomputation), without values that the backward does not need."""
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
        """Vertices of the lower hull: the two ends, then the point farthest below the line between two vertices."""
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
        """Ways with the least time for a number of bytes in the middle of the widest gaps."""
        gaps = sorted(pairwise(points), key=lambda pair: (pair[0][0] - pair[1][0]) * abs(pair[0][1] - pair[1][1]))
        for (low, _), (high, _) in gaps[:BETWEEN]:
            if high - low < SAME:
                continue
            way = self.solve(np.concatenate([SAME * self.size, self.time]), (low + high) / 2)
            if way is not None:
                yield way

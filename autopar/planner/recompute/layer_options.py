"""Which values of one layer to save and which to make again: the ways that are worth choosing from.

x is a forward value with time t_x to make it and b_x bytes; W what the backward takes. s_x: it is saved, r_x: the
backward makes it again.

    min  sum t_x r_x + price * sum b_x (s_x + weight * r_x)
    s_x + r_x >= 1            x in W
    s_u + r_u >= r_x          u an operand of x

Every constraint is a difference of the two unknowns a_x = s_x + r_x and r_x, so the linear program is a minimum cut and
its solutions are whole numbers. Raising the price walks along the lower hull of (bytes, time). ``weight`` counts values
that are made again, which live together for a while. Between far vertices of the hull integer programs with a bound on
the bytes find more (HiGHS, by scipy).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

WEIGHTS = (0.0, 0.25)
VERTICES = 10  # of a hull
BETWEEN = 6  # integer programs
NEAR = 1e-6  # of all bytes, or of all time: no difference
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
    time), as far as they were looked for."""
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
            np.concatenate([price * self.size, by_time * self.time + price * weight * self.size + NEAR / 100])
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
        ends = [self.at(NEAR, weight), self.at(1.0, weight, NEAR)]
        yield from ends
        queue = [tuple(map(self.costs, ends))]
        for _ in range(VERTICES):
            if not queue:
                return
            left, right = queue.pop(0)
            saved, lost = left[0] - right[0], right[1] - left[1]
            if saved < NEAR or lost < NEAR:
                continue
            way = self.at(lost / saved, weight)
            new = self.costs(way)
            if new[1] + lost / saved * new[0] < left[1] + lost / saved * left[0] - NEAR:
                yield way
                queue += [(left, new), (new, right)]

    def between(self, points: Sequence[tuple[float, float]]) -> Iterator[frozenset[int]]:
        """The least time for bytes in the middle of the widest gaps."""
        gaps = sorted(pairwise(points), key=lambda pair: (pair[0][0] - pair[1][0]) * abs(pair[0][1] - pair[1][1]))
        for (low, _), (high, _) in gaps[:BETWEEN]:
            if high - low < NEAR:
                continue
            way = self.solve(np.concatenate([NEAR * self.size, self.time]), (low + high) / 2)
            if way is not None:
                yield way

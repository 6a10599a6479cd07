"""The seconds that a pipeline takes, by the path of actions that decides them: what `autopar.schedule.simulate` finds,
fast enough for a search, and as a sum of the times on that path.

An order is compiled once, to a list of cells in which all that a cell waits for comes before it. Any times of its parts
then take one pass over the list. A pipeline of many microbatches takes what one of a few takes, and for each microbatch
more what the slowest rank computes.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from autopar.schedule.order import Action, Order
from autopar.schedule.request import SCHEDULES, Costs, Request
from autopar.schedule.simulate import Dependencies, Key, key_of, simulate

STEADY = 3  # microbatches per rank that are run
Part = tuple[str, int]  # F, B or W, and the part of the model
COMM: Part = ("comm", 0)  # latency of a transfer
NOTHING, NEVER = 0, 1  # in place of a cell before the first of a rank, and of one on another rank


class CriticalPath:
    """The longest path through an order that is not lowered."""

    def __init__(self, order: Order) -> None:
        """``order``: of schedules without token slices."""
        self.microbatches = order.microbatches
        self.cells: list[tuple[int, int, int]] = []  # cell before it on its rank, on another rank, what it takes
        self.taken: dict[tuple[Part, ...], int] = {(): 0}
        self.first: dict[int, int] = {}  # rank -> its first cell
        self.last: dict[int, int] = {}
        self._compile(order)

    def _compile(self, order: Order) -> None:
        starts, needs = simulate(order).start, Dependencies(order)
        done: dict[Key, int] = {}
        together: list[Action] = []  # of one cell
        for _, rank, i in sorted((at, rank, i) for rank, row in enumerate(starts) for i, at in enumerate(row)):
            together.append(order.ranks[rank][i])
            if together[-1].paired:
                continue
            keys = [key for action in together for key in needs(action)]
            *others, other = [done[key] for key in keys if order.rank_of[key[1]] != rank] or [NEVER]
            for waited in others:
                self._add(rank, waited, ())
            parts = tuple((kind, order.part_of(action.stage)) for action in together for kind in action.kind)
            self.first.setdefault(rank, self._add(rank, other, parts))
            done |= dict.fromkeys(map(key_of, together), self.last[rank])
            together = []

    def _add(self, rank: int, other: int, parts: tuple[Part, ...]) -> int:
        self.cells.append((self.last.get(rank, NOTHING), other, self.taken.setdefault(parts, len(self.taken))))
        self.last[rank] = len(self.cells) + NEVER
        return self.last[rank]

    def seconds(self, times: Mapping[Part, float]) -> float:
        """The longest time that one rank takes, from its own first start, as `Timeline.cost`."""
        return max(seconds for seconds, _ in self._windows(self._ends(times), times))

    def path(self, times: Mapping[Part, float]) -> Counter[Part]:
        """How often each time is on the longest path: the seconds are their sum."""
        ends = self._ends(times)
        _, rank = max(self._windows(ends, times))
        found = self._back(self.last[rank], ends, times)
        found.subtract(self._back(self.first[rank], ends, times))
        found.update(self._parts[self.first[rank]])
        return found

    def _ends(self, times: Mapping[Part, float]) -> list[float]:
        taken, comm = [sum(times[part] for part in parts) for parts in self.taken], times[COMM]
        ends = [0.0, -math.inf]
        add = ends.append
        for before, other, time in self.cells:
            start, arrival = ends[before], ends[other] + comm
            add((start if start > arrival else arrival) + taken[time])
        return ends

    def _windows(self, ends: list[float], times: Mapping[Part, float]) -> Iterator[tuple[float, int]]:
        for rank, last in self.last.items():
            first = self.first[rank]
            yield ends[last] - ends[first] + sum(times[part] for part in self._parts[first]), rank

    @functools.cached_property
    def _parts(self) -> list[tuple[Part, ...]]:
        """What each cell computes."""
        known = list(self.taken)
        return [(), (), *(known[time] for _, _, time in self.cells)]

    def _back(self, cell: int, ends: list[float], times: Mapping[Part, float]) -> Counter[Part]:
        """What is on the path to the end of a cell."""
        found = Counter[Part]()
        while cell > NEVER:
            found.update(self._parts[cell])
            before, other, _ = self.cells[cell - NEVER - 1]
            late = ends[other] + times[COMM] > ends[before]
            found[COMM] += late
            cell = other if late else before
        return found


def by_part(costs: Costs) -> dict[Part, float]:
    """Times of each part, of costs with one value per part, and of a transfer."""
    parts = {(kind, k): time for kind in "FBW" for k, time in enumerate(getattr(costs, kind))}
    return parts | {COMM: costs.comm}


T = TypeVar("T")


def steady_pipeline(
    schedule: str, request: Request, seconds: Callable[[CriticalPath], T], slowest: T, most: Callable[[T, T], T]
) -> tuple[int, T, T]:
    """(microbatches that are run, their seconds, seconds of each one more).

    seconds: of an order. slowest: seconds of the slowest rank for one microbatch. most: the larger of two."""
    few, ranks = order_of_few(schedule, request), request.ranks
    found, more = seconds(few), slowest
    if schedule == "interleaved" and few.microbatches > ranks:  # in each round, ranks wait for uneven parts
        fewer = _critical_path(schedule, replace(request, microbatches=few.microbatches - ranks))
        more = most(slowest, (found - seconds(fewer)) / ranks)  # type: ignore[operator]
    return few.microbatches, found, more


def order_of_few(schedule: str, request: Request) -> CriticalPath:
    """Of as many microbatches as are run. Raises ValueError for sizes that the schedule cannot run."""
    few = min(request.microbatches, STEADY * request.ranks)
    return _critical_path(schedule, replace(request, microbatches=few))


@functools.lru_cache(maxsize=256)
def _critical_path(schedule: str, request: Request) -> CriticalPath:
    """One that is searched for is at least as fast as the one that the search begins with."""
    return CriticalPath(SCHEDULES["zb_h1" if SCHEDULES[schedule].searches else schedule].make(request))

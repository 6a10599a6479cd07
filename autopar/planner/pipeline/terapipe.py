"""Where to cut a sequence so that slices of tokens fill a pipeline: TeraPipe's dynamic program (Li et al., ICML 2021).

Causal attention lets a stage start on tokens l1.. of a sequence while the next one works on tokens 0..l1. A slice of l
tokens behind c earlier ones takes t(l, c), so that slices s_1..s_M on K equal stages take

    T = Σ t_i + (K - 1) max t_i                                                                  (Eq. 5)

For a bound t_max on every slice, the least sum over slicings of the first i tokens is

    S*(i; t_max) = min_k { S*(i - k; t_max) + t(k, i - k) :  t(k, i - k) <= t_max }              (Eq. 7, 8)
    T*           = min over t_max of  S*(L; t_max) + (K - 1) t_max                               (Eq. 6)

With a batch, each of its groups of b sequences is sliced by that program with t(b, ·, ·), and a second program over
the number of sequences picks the groups (section 3.4). The t_max that can matter are the values of t on the grid.
S* never grows with t_max, so S*(b) + (K - 1) a bounds all candidates in [a, b] from below: the outer minimum is taken
by branch and bound, best bound first, which is exact and solves a few dozen of some 10⁴ inner programs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
# (batch, lengths, contexts) -> seconds, for arrays of lengths and contexts of equal shape; `SliceEstimate` is one.
Time = Callable[[int, Any, Any], Any]
Groups = Sequence[tuple[int, Sequence[int]]]

# Sums that differ by less are equal.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Slicing:
    """groups: (sequences, lengths of their slices) of every microbatch. total: T. longest: the greatest slice time."""

    groups: tuple[tuple[int, tuple[int, ...]], ...]
    total: float
    longest: float


def pipeline_time(slice_times: Iterable[float], stages: int) -> float:
    """T of slices that pass ``stages`` equal stages one after another: Σ t + (K - 1) max t."""
    times = list(slice_times)
    return math.fsum(times) + (stages - 1) * max(times, default=0.0)


def slice_times(groups: Groups, time: Time) -> list[float]:
    """The time of every slice on one stage, microbatch by microbatch."""
    found: list[float] = []
    for batch, lengths in groups:
        contexts = np.cumsum([0, *lengths[:-1]])
        found += np.broadcast_to(time(batch, np.asarray(lengths), contexts), len(lengths)).tolist()
    return found


def best_slices(
    length: int,
    stages: int,
    time: Time,
    batch: int = 1,
    microbatch: int | None = None,
    grid: int = 8,
    t_max: float = math.inf,
    gap: float = 0.0,
) -> Slicing:
    """The slicing of ``batch`` sequences of ``length`` tokens that takes the least time on ``stages`` equal stages.

    time: seconds of a slice on one stage, see `Time`. microbatch: sequences per microbatch, all sliced alike; None
    chooses them too. grid: slices are cut at multiples of it; where it does not divide the length, the last slice takes
    the odd tokens. t_max: no slice may take longer. gap: T may be up to (stages - 1)·gap above the least.
    Raises ValueError for sizes below 1, a microbatch that does not divide the batch, times that are not numbers, and a
    t_max below every slicing's.
    """
    for name, value in (("length", length), ("stages", stages), ("batch", batch), ("grid", grid)):
        if value < 1:
            raise ValueError(f"token_slices: {name} needs to be at least 1, found {value}")
    if microbatch is not None and (microbatch < 1 or batch % microbatch):
        raise ValueError(
            f"token_slices: a batch of {batch} sequences does not divide into microbatches of {microbatch}; use a "
            f"divisor of {batch}"
        )
    program = _SliceProgram(length, batch, microbatch, grid, time)
    found = _least(program, stages, t_max, gap)
    if found is None:
        raise ValueError(
            f"token_slices: no slicing of {length} tokens on a grid of {grid} keeps every slice within t_max = "
            f"{t_max:g} s; use at least {program.least_bound():g} s, or a finer grid"
        )
    return Slicing(found.groups, pipeline_time(found.times, stages), max(found.times))


# --- one t_max -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Solution:
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    times: tuple[float, ...]


class _SliceProgram:
    """Tabulated times, and the inner programs over tokens and sequences for a given t_max.

    ``points``: where slices may begin and end. ``table[j, s, i]``: time of tokens points[i]..points[j] of sizes[s]
    sequences; infinite for i >= j.
    """

    def __init__(self, length: int, batch: int, microbatch: int | None, grid: int, time: Time) -> None:
        self.batch = batch
        self.sizes = [microbatch] if microbatch is not None else list(range(1, batch + 1))
        self.points = np.array([*range(0, length, grid), length])
        count = len(self.points)
        self.table = np.full((count, len(self.sizes), count), np.inf)
        end, start = np.tril_indices(count, -1)
        for s, size in enumerate(self.sizes):
            values = np.asarray(time(size, self.points[end] - self.points[start], self.points[start]), dtype=float)
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise ValueError(f"token_slices: times need to be finite and not negative, found {values.min()} s")
            self.table[end, s, start] = values
        self.candidates = np.unique(self.table[np.isfinite(self.table)])

    def solve(self, t_max: float) -> _Solution | None:
        """The least sum of times with every slice within t_max; None if there is none."""
        sums, before = self._tokens(t_max)
        total, chosen = self._sequences(sums)
        if math.isinf(total):
            return None
        slicings = {s: self._slices(before, s) for s in set(chosen)}
        groups = tuple((self.sizes[s], slicings[s][0]) for s in chosen)
        return _Solution(groups, tuple(t for s in chosen for t in slicings[s][1]))

    def _tokens(self, t_max: float) -> tuple[Array, npt.NDArray[np.intp]]:
        """S* of the whole length per size, and [point, size] -> where the slice that ends there begins.

        Of equal sums the one with the least sum of squares: the evenest.
        """
        count = len(self.points)
        sums = np.full((len(self.sizes), count), np.inf)
        squares = np.zeros_like(sums)
        sums[:, 0] = 0.0
        before = np.zeros((count, len(self.sizes)), dtype=np.intp)
        rows = np.arange(len(self.sizes))
        for j in range(1, count):
            times = self.table[j, :, :j]
            costs = np.where(times <= t_max, sums[:, :j] + times, np.inf)
            equal = costs <= costs.min(axis=1, keepdims=True) * (1 + _ROUNDING)
            spread = np.where(equal, squares[:, :j] + times**2, np.inf)
            before[j] = spread.argmin(axis=1)
            sums[:, j], squares[:, j] = costs[rows, before[j]], spread[rows, before[j]]
        return sums[:, -1], before

    def _sequences(self, sums: Array) -> tuple[float, list[int]]:
        """Groups whose sizes sum to the batch, at the least sum: (sum, indices of sizes)."""
        best = [0.0] + [math.inf] * self.batch
        last = [0] * (self.batch + 1)
        for n in range(1, self.batch + 1):
            for s, size in enumerate(self.sizes):
                if size <= n and best[n - size] + sums[s] < best[n] * (1 - _ROUNDING):  # of equals the smaller groups
                    best[n], last[n] = best[n - size] + float(sums[s]), s
        chosen, n = [], self.batch
        while n and not math.isinf(best[n]):
            chosen.append(last[n])
            n -= self.sizes[last[n]]
        return best[self.batch], chosen

    def _slices(self, before: npt.NDArray[np.intp], s: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Lengths and times of a size's slices, first one first."""
        cuts = [len(self.points) - 1]
        while cuts[-1]:
            cuts.append(int(before[cuts[-1], s]))
        pairs = list(zip(cuts[1:], cuts))[::-1]
        lengths = tuple(int(self.points[j] - self.points[i]) for i, j in pairs)
        return lengths, tuple(float(self.table[j, s, i]) for i, j in pairs)

    def least_bound(self) -> float:
        """The least t_max that some slicing keeps."""
        low, high = 0, len(self.candidates) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.solve(self.candidates[middle]) else (middle + 1, high)
        return float(self.candidates[low])


# --- the minimum over t_max ----------------------------------------------------------------------------------


def _least(program: _SliceProgram, stages: int, t_max: float, gap: float) -> _Solution | None:
    """Branch and bound over the sorted candidates. An entry of the queue: (bound of T, first, last, bound of S*)."""
    values = program.candidates
    best: _Solution | None = None
    total = math.inf
    behind = int(np.searchsorted(values, t_max, side="right"))
    queue = [(0.0, 0, behind - 1, 0.0)]
    middle = behind - 1  # first the loosest bound: its sum is the least of all
    while queue:
        bound, low, high, least = heapq.heappop(queue)
        if low > high or bound >= total - (stages - 1) * gap:
            continue
        if total < math.inf:
            middle = int(np.searchsorted(values, (values[low] + values[high]) / 2, side="right")) - 1
        found = program.solve(values[middle])
        if found is not None:
            sums, longest = math.fsum(found.times), max(found.times)
            if (here := sums + (stages - 1) * longest) < total:
                best, total = found, here
            # every t_max from the longest slice's time to here has the same S*, and T at least as great
            below = int(np.searchsorted(values, longest)) - 1
            if low <= below:
                heapq.heappush(queue, (sums + (stages - 1) * float(values[low]), low, below, sums))
        elif math.isinf(total):
            return None
        if middle < high:
            heapq.heappush(queue, (least + (stages - 1) * float(values[middle + 1]), middle + 1, high, least))
    return best

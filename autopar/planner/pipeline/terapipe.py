"""Where to slice a sequence so that token slices fill a pipeline: TeraPipe's dynamic program (Li et al., ICML 2021).

With causal attention, a stage can start on tokens l1.. of a sequence while the next stage works on tokens 0..l1. A
slice of l tokens after c earlier ones takes t(l, c), so that slices s_1..s_M on K equal stages take

    T = Σ t_i + (K - 1) max t_i                                                                  (Eq. 5)

For a bound t_max on every slice, the least sum over slicings of the first i tokens is

    S*(i; t_max) = min_k { S*(i - k; t_max) + t(k, i - k) :  t(k, i - k) <= t_max }              (Eq. 7, 8)
    T*           = min over t_max of  S*(L; t_max) + (K - 1) t_max                               (Eq. 6)

All microbatches are sliced alike. The t_max that can matter are the values of t on the grid.
S* never grows with t_max, so S*(b) + (K - 1) a is a lower bound for all candidates in [a, b]. Branch and bound, best
bound first, finds the outer minimum; it is exact and solves a few dozen of some 10⁴ inner programs.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

# (batch, lengths, contexts) -> seconds, for arrays of lengths and contexts of equal shape; `SliceEstimate` is one.
Time = Callable[[int, Any, Any], Any]

# Sums that differ by less are equal.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Slicing:
    """groups: (sequences, lengths of their slices) of every microbatch. total: T."""

    groups: tuple[tuple[int, tuple[int, ...]], ...]
    total: float


def pipeline_time(slice_times: Iterable[float], stages: int) -> float:
    """T of slices that pass ``stages`` equal stages one after another: Σ t + (K - 1) max t."""
    times = list(slice_times)
    return math.fsum(times) + (stages - 1) * max(times, default=0.0)


def best_slices(length: int, stages: int, time: Time, batch: int = 1, microbatch: int = 1, grid: int = 8) -> Slicing:
    """The slicing of ``batch`` sequences of ``length`` tokens that takes the least time on ``stages`` equal stages.

    time: seconds of a slice on one stage, see `Time`. microbatch: sequences per microbatch. grid: slices begin at
    multiples of it; if it does not divide the length, the last slice has the remaining tokens.
    Raises ValueError for sizes below 1, a microbatch that does not divide the batch, and times that are not finite.
    """
    for name, value in (("length", length), ("stages", stages), ("batch", batch), ("grid", grid)):
        if value < 1:
            raise ValueError(f"token_slices: {name} needs to be at least 1, found {value}")
    if microbatch < 1 or batch % microbatch:
        raise ValueError(
            f"token_slices: a batch of {batch} sequences does not divide into microbatches of {microbatch}; use a "
            f"divisor of {batch}"
        )
    count = batch // microbatch
    lengths, times = _least(_SliceProgram(length, microbatch, grid, time), count, stages)
    return Slicing(((microbatch, lengths),) * count, pipeline_time(times * count, stages))


# --- one t_max -----------------------------------------------------------------------------------------------

# Lengths and times of the slices of a microbatch.
_Solution = tuple[tuple[int, ...], tuple[float, ...]]


class _SliceProgram:
    """Tabulated times, and the inner program over tokens for a given t_max.

    ``points``: where slices may begin and end. ``table[j, i]``: time of tokens points[i]..points[j]; infinite for
    i >= j.
    """

    def __init__(self, length: int, size: int, grid: int, time: Time) -> None:
        self.points = np.array([*range(0, length, grid), length])
        count = len(self.points)
        self.table = np.full((count, count), np.inf)
        end, start = np.tril_indices(count, -1)
        values = np.asarray(time(size, self.points[end] - self.points[start], self.points[start]), dtype=float)
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ValueError(f"token_slices: times need to be finite and not negative, found {values.min()} s")
        self.table[end, start] = values
        self.candidates = np.unique(self.table[np.isfinite(self.table)])

    def solve(self, t_max: float) -> _Solution | None:
        """The least sum of times with every slice within t_max; None if there is none.

        Of equal sums the one with the least sum of squares: the evenest.
        """
        count = len(self.points)
        sums, squares = np.full(count, np.inf), np.zeros(count)
        sums[0] = 0.0
        before = [0] * count
        for j in range(1, count):
            times = self.table[j, :j]
            costs = np.where(times <= t_max, sums[:j] + times, np.inf)
            spread = np.where(costs <= costs.min() * (1 + _ROUNDING), squares[:j] + times**2, np.inf)
            before[j] = i = int(spread.argmin())
            sums[j], squares[j] = costs[i], spread[i]
        if math.isinf(sums[-1]):
            return None
        cuts = [count - 1]
        while cuts[-1]:
            cuts.append(before[cuts[-1]])
        pairs = list(itertools.pairwise(reversed(cuts)))
        lengths = tuple(int(self.points[j] - self.points[i]) for i, j in pairs)
        return lengths, tuple(float(self.table[j, i]) for i, j in pairs)


# --- the minimum over t_max ----------------------------------------------------------------------------------


def _least(program: _SliceProgram, count: int, stages: int) -> _Solution:
    """Branch and bound over the sorted candidates. An entry of the queue: (bound of T, first, last, bound of S*)."""
    values = program.candidates
    total = math.inf
    queue = [(0.0, 0, len(values) - 1, 0.0)]
    middle = len(values) - 1  # first the loosest bound: its sum is the least of all
    while queue:
        bound, low, high, least = heapq.heappop(queue)
        if low > high or bound >= total:
            continue
        if total < math.inf:
            middle = int(np.searchsorted(values, (values[low] + values[high]) / 2, side="right")) - 1
        if found := program.solve(values[middle]):
            sums, longest = math.fsum(found[1] * count), max(found[1])
            if (here := sums + (stages - 1) * longest) < total:
                best, total = found, here
            # every t_max from the longest slice's time to here has the same S*, and T at least as great
            below = int(np.searchsorted(values, longest)) - 1
            if low <= below:
                heapq.heappush(queue, (sums + (stages - 1) * float(values[low]), low, below, sums))
        if middle < high:
            heapq.heappush(queue, (least + (stages - 1) * float(values[middle + 1]), middle + 1, high, least))
    return best

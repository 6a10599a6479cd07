"""Where to split a model's units (layers, and what is between them) into parts, so that the slowest part is fastest.

A pipeline runs at the speed of its slowest part, so the first goal is the least maximal time of a part, under a memory
limit. It is the classic linear partition problem, solved exactly by dynamic programming over (parts, units):

    T(k, j) = min over i < j of max(T(k - 1, i), time of units i..j as part k),   parts above the limit left out

A second program of the same form minimises, among the splits that reach that time, first the bytes sent over the
boundaries, then the sum of squared times. Ties give more units to later parts, which hold fewer microbatches under
1F1B. Both programs use integer times, in billionths of their sum, so that equal sums compare equal.

If a rank runs several parts (interleaved, V), its parts share the limit, and its time is their sum. Parts that share a
rank are not adjacent, so a dynamic program over contiguous parts cannot see them. Instead, one local search starts from
the exact split for time, another from that for memory, and the better result is taken. Each step shifts the run of
boundaries that helps most by one unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[Any]  # [from, to]: something of the pieces from..to as one part
Cut = npt.NDArray[Any]  # [parts + 1]: where the parts begin, and the end; [..., parts + 1]: several cuts
_GREATEST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class UnitCosts:
    """What one unit costs a rank.

    time: of one microbatch, forward and backward, in any unit. static: bytes that do not depend on the schedule:
    parameters, gradients, optimizer states. activations: bytes kept per microbatch in flight.
    """

    time: float
    static: int = 0
    activations: int = 0


def balance(
    units: Sequence[UnitCosts],
    parts: int,
    *,
    sent: Sequence[int | None] = (),
    in_flight: Sequence[int] = (),
    limit: int | None = None,
    rank_of_part: Sequence[int] = (),
) -> list[int]:
    """Number of units in each of ``parts`` contiguous, non-empty parts.

    sent: bytes over the boundary after each unit but the last; None forbids a split there (default: no bytes).
    in_flight: microbatches that each part holds at once, such as min(m, p - i) for 1F1B (default 1).
    limit: bytes of a rank. rank_of_part: the rank of each part (default: one part per rank); for parts with a copy on a
    mirrored rank, a number that the mirrored ranks share.

    One part per rank: exact, see the module. Several: every part within the least possible time of a part, unless the
    limit forbids it, and a local optimum of the ranks' summed times.
    Raises ValueError for fewer units than parts, too many forbidden boundaries, or if no split fits.
    """
    problem = _Balancing(units, parts, sent, in_flight, rank_of_part)
    if problem.pieces < parts:
        raise ValueError(
            f"pipeline: {parts} stages need at least {parts} layers that can be separated, found {problem.pieces}; use "
            f"at most {problem.pieces} stages (a smaller pp axis, or fewer virtual stages)"
        )
    found = problem.solve(limit)
    if found is None:
        raise ValueError(
            f"pipeline: no split of {len(units)} layers into {parts} stages fits a memory limit of {limit:,} bytes; "
            f"the least that would do is {problem.least_limit():,} bytes; use more ranks, fewer microbatches in "
            "flight, ZeRO or activation checkpointing"
        )
    return problem.counts(found)


class _Balancing:
    """Matrices over pieces (runs of units that must not be separated), and the searches. ``time``: integers, of
    2^-scale units."""

    def __init__(
        self,
        units: Sequence[UnitCosts],
        parts: int,
        sent: Sequence[int | None],
        in_flight: Sequence[int],
        rank_of_part: Sequence[int],
    ) -> None:
        _check(units, parts, sent, in_flight, rank_of_part)
        boundaries = [0, *(sent or [0] * (len(units) - 1)), 0][: len(units) + 1]
        self.ends = [i for i, b in enumerate(boundaries) if b is not None]  # of pieces, in units
        total = math.fsum(u.time for u in units)
        scale = 30 - math.frexp(total)[1] if total > 0 else 0
        self.time = self._ranges([round(math.ldexp(u.time, scale)) for u in units])
        self.static = self._ranges([u.static for u in units])
        self.activations = self._ranges([u.activations for u in units])
        self.sent = np.array([boundaries[i] for i in self.ends], dtype=np.int64)[None, :].repeat(len(self.ends), 0)
        self.valid = np.tri(len(self.ends), k=-1, dtype=bool).T
        self.parts, self.pieces = parts, len(self.ends) - 1
        self.in_flight = np.array(in_flight or [1] * parts, dtype=np.int64)
        ranks = list(rank_of_part) or list(range(parts))
        self.runs = np.array([[r == rank for rank in sorted(set(ranks))] for r in ranks], dtype=np.float64)
        self.shared = self.runs.shape[1] < parts

    def _ranges(self, values: Sequence[int]) -> Matrix:
        """[i, j] -> sum of the values of pieces i..j (meaningless for i > j)."""
        sums = np.array([0, *accumulate(values)], dtype=np.int64)[self.ends]
        return np.asarray(sums[None, :] - sums[:, None])

    def counts(self, cut: Cut) -> list[int]:
        """Units per part."""
        return [self.ends[b] - self.ends[a] for a, b in pairwise(cut)]

    def memory(self, part: int) -> Matrix:
        return np.asarray(self.static + self.in_flight[part] * self.activations)

    def solve(self, limit: int | None) -> Cut | None:
        """The best split that was found; None if none fits."""
        first = self.program(self.allowed(None, limit), lambda k: [self.time], np.maximum)
        if first is None:
            return None
        bound = int(self.time[first[:-1], first[1:]].max())
        best = self.program(self.allowed(bound, limit), lambda k: [self.sent, self.time**2], np.add)
        assert best is not None
        if not self.shared:
            return best
        keys = self._too_slow(bound, limit)
        found = np.stack([self.descend(start, keys) for start in (best, self.evenest())])
        above, *_ = values = keys(found)
        choice = np.lexsort(values[::-1])[0]
        return None if above[choice] else found[choice]

    def allowed(self, bound: int | None, limit: int | None) -> Callable[[int], Matrix]:
        """Part -> the ranges of pieces that it may be."""
        base = self.valid if bound is None else self.valid & (self.time <= bound)
        return lambda part: base if limit is None else base & (self.memory(part) <= limit)

    def program(
        self, allowed: Callable[[int], Matrix], costs: Callable[[int], list[Matrix]], combine: Callable[..., Matrix]
    ) -> Cut | None:
        """The split with the least combined costs, compared in order; None if no split is allowed."""
        places = np.arange(self.pieces + 1)
        values = [np.zeros(self.pieces + 1, dtype=np.int64) for _ in costs(0)]
        reached = places == 0
        before = []
        for part in range(self.parts):
            best = allowed(part) & reached[:, None]
            reached = best.any(axis=0)
            sums = [combine(value[:, None], cost) for value, cost in zip(values, costs(part))]
            for s in sums:
                best &= s == np.where(best, s, _GREATEST).min(axis=0)
            before.append(best.argmax(axis=0))
            values = [np.where(reached, s[before[-1], places], 0) for s in sums]
        if not reached[-1]:
            return None
        cut = [self.pieces]
        for starts in reversed(before):
            cut.append(int(starts[cut[-1]]))
        return np.array(cut[::-1])

    def least_limit(self) -> int:
        """The least limit for which `solve` finds a split."""
        return int(self.of_ranks(self.evenest())[1].max())

    def evenest(self) -> Cut:
        """The split whose fullest rank needs least memory."""
        cut = self.program(self.allowed(None, None), lambda k: [self.memory(k)], np.maximum)
        assert cut is not None
        return self.descend(cut, self._too_large) if self.shared else cut

    # --- several parts per rank ------------------------------------------------------------------------------

    def of_ranks(self, cuts: Cut) -> tuple[Matrix, Matrix]:
        """(time, bytes) of every rank, [..., ranks] for splits [..., parts + 1]. Exact: below 2^53."""
        a, b = cuts[..., :-1], cuts[..., 1:]
        memory = self.static[a, b] + self.in_flight * self.activations[a, b]
        return self.time[a, b] @ self.runs, memory @ self.runs

    def _too_large(self, cuts: Cut) -> list[Matrix]:
        memory = self.of_ranks(cuts)[1]
        return [memory.max(axis=-1), np.square(memory).sum(axis=-1)]

    def _too_slow(self, bound: int, limit: int | None) -> Callable[[Cut], list[Matrix]]:
        def keys(cuts: Cut) -> list[Matrix]:
            time, memory = self.of_ranks(cuts)
            above = np.maximum(memory - (math.inf if limit is None else limit), 0).sum(axis=-1)
            slow = np.maximum(self.time[cuts[..., :-1], cuts[..., 1:]] - bound, 0).sum(axis=-1)
            return [above, slow, time.max(axis=-1), np.square(time).sum(axis=-1)]

        return keys

    def descend(self, cut: Cut, keys: Callable[[Cut], list[Matrix]]) -> Cut:
        """Shift runs of boundaries by one piece, the most helpful first, while that lowers the keys (compared in
        order). Shifting a run moves one piece out of the part at one end and one into the part at the other."""
        a, b = np.triu_indices(self.parts - 1)
        places = np.arange(self.parts + 1)
        run = ((places > a[:, None]) & (places <= b[:, None] + 1)).astype(np.int64)
        steps = np.concatenate([0 * run[:1], run, -run])
        while True:
            moves = cut + steps
            moves = moves[(np.diff(moves, axis=1) > 0).all(axis=1)]
            values = np.stack(keys(moves), axis=1)
            order = np.lexsort(values.T[::-1])
            if tuple(values[order[0]]) >= tuple(values[0]):
                return cut
            cut = moves[order[0]]


def _check(
    units: Sequence[UnitCosts],
    parts: int,
    sent: Sequence[int | None],
    in_flight: Sequence[int],
    rank_of_part: Sequence[int],
) -> None:
    assert not sent or len(sent) == len(units) - 1, f"{len(units)} units have {len(units) - 1} boundaries"
    assert not in_flight or len(in_flight) == parts, "one number in flight per part"
    assert not rank_of_part or len(rank_of_part) == parts, "one rank per part"
    if parts < 1:
        raise ValueError(f"pipeline: a model has at least 1 stage, found {parts}")
    for i, unit in enumerate(units):
        if not (math.isfinite(unit.time) and unit.time >= 0 and unit.static >= 0 and unit.activations >= 0):
            raise ValueError(f"pipeline: costs need to be finite and not negative, found {unit} of layer {i}")

"""Which ranks compute longer than those that do the same.

Ranks that wait for a slow one take as long as it does, so the time of a step says nothing. Their computing does: a rank
is compared with the median of the other ranks of its pipeline stage, over the kinds of steps that both have run. A rank
that is alone in its stage is compared with its own first steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.runtime.fault.error_propagation import ranks_named
from autopar.runtime.health.step_times import RankTimes

BEHIND = 0.10  # share by which a rank's computing is longer, from which on it is slow
CALLS = 10  # of a kind, from which on it counts


@dataclass(frozen=True)
class Compared:
    """``longer``: by which share of theirs a rank computes longer than ``others``; than its own first steps, if there
    are none."""

    longer: float
    others: tuple[int, ...]

    def __str__(self) -> str:
        than = ranks_named(self.others) if len(self.others) < 8 else f"{len(self.others)} other ranks of its stage"
        return f"computes {self.longer:.0%} longer than {than if self.others else 'in its own first steps'}"


@dataclass(frozen=True)
class Health:
    """The last minute of all ranks, in their order. ``print(health)`` shows a line for each."""

    ranks: Sequence[RankTimes]

    @property
    def compared(self) -> dict[int, Compared]:
        """Rank -> how its computing compares; without ranks that have too few steps."""
        found = ((one.rank, compare(one, self.ranks)) for one in self.ranks)
        return {rank: how for rank, how in found if how is not None}

    @property
    def slow(self) -> dict[int, Compared]:
        """The ranks that compute at least 10 % longer."""
        return {rank: how for rank, how in self.compared.items() if how.longer >= BEHIND}

    def rows(self) -> list[tuple[str, dict[str, float], str]]:
        """Of each rank its name, the seconds that it spent on what, and if it is slow, how much longer it computes."""
        slow = self.slow
        return [(str(x), x.spent(), f"{slow[x.rank].longer:.0%} longer" if x.rank in slow else "") for x in self.ranks]

    def __str__(self) -> str:
        return "\n".join(_line(one, self.slow.get(one.rank)) for one in self.ranks)


def compare(one: RankTimes, among: Iterable[RankTimes]) -> Compared | None:
    """None if too few steps have run."""
    others = [x for x in among if x.rank != one.rank and x.place.get("pp", 0) == one.place.get("pp", 0)]
    own = theirs = 0.0
    for name, calls in one.kinds.items():
        known = [x.kinds[name].computing for x in others if name in x.kinds and x.kinds[name].count >= CALLS]
        usual = statistics.median(known) if known else None if others else calls.early
        if usual is not None and calls.count >= CALLS:
            own += calls.count * calls.computing
            theirs += calls.count * usual
    return Compared(own / theirs - 1, tuple(x.rank for x in others)) if theirs > 0 else None


def _line(one: RankTimes, slow: Compared | None) -> str:
    if not one.calls:
        return f"{one}: no steps in the last minute"
    parts = ", ".join(f"{what} {seconds / one.seconds:.0%}" for what, seconds in one.spent().items())
    return f"{one}: {one.calls} steps, {parts}{f'; SLOW: {slow}' if slow is not None else ''}"

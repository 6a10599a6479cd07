"""A ring in both directions: the first half of each span of keys goes up, the second half down, side by side.

    rank 0 <-> rank 1 <-> rank 2 <-> ...     each link carries half as much each way as a ring in one direction
"""

from __future__ import annotations

from autopar.attention import ALGORITHMS, Problem
from autopar.passes.attention.circulate import Circulation
from autopar.passes.attention.ring import Ring


class BiRing(Ring):
    """Half of the keys and values circulate up, half down."""

    name = "bi_ring"
    title = "half of the keys and values goes round each way"
    layouts = ("zigzag", "contiguous")

    def circulations(self, problem: Problem) -> tuple[Circulation, ...]:
        """See `Ring.circulations`."""
        return Circulation("columns", 1, 0, 2), Circulation("columns", -1, 1, 2)


ALGORITHMS.add(BiRing.name, BiRing())

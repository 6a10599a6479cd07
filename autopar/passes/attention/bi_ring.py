"""A ring in both directions: the first half of each span of keys goes up, the second half down, side by side.

    k0 v0    rank 0 --> rank 1 --> rank 2 -->          k1 v1    rank 0 <-- rank 1 <-- rank 2 <--

Each link carries half as much each way as in a ring of one direction, so links that carry both ways take half the time.
"""

from __future__ import annotations

from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.problem import Problem
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

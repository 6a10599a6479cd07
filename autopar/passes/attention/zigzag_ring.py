"""A ring for causal sequences dealt in zigzag: chunks i and 2N - 1 - i to rank i, so that all steps cost the same.

    step 0    both own chunks against both                    (two triangles and a square)
    step t    keys of a lower rank: all queries, first half of the keys
              keys of a higher rank: second half of the queries, all keys

It turns *down*. The second half of a rank's keys is used by lower ranks only, which are then visited first, and it goes
no further: three quarters of a full ring's bytes, for any number of ranks.
"""

from __future__ import annotations

from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.problem import Problem
from autopar.passes.attention.circulate import Circulation
from autopar.passes.attention.ring import Ring


class ZigzagRing(Ring):
    """Keys and values circulate down."""

    name = "zigzag_ring"
    title = "keys and values go round, the late ones only as far as they are used"
    layouts = ("zigzag",)

    def circulations(self, problem: Problem) -> tuple[Circulation, ...]:
        """See `Ring.circulations`."""
        return (Circulation("columns", -1),)


ALGORITHMS.add(ZigzagRing.name, ZigzagRing())

"""Ulysses: heads are exchanged for sequence; Jacobs et al., arXiv:2309.14509.

    [heads, S/N] of each rank  -- all-to-all -->  [heads/N, S]  -- attention -->  [heads/N, S]  -- all-to-all -->

The all-to-alls stand in the graph around the attention (`AttentionAlgorithm.head_ranks`). Between them one rank is
left: it holds all of the sequence, and nothing goes round.
"""

from __future__ import annotations

from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.problem import Problem
from autopar.passes.attention.circulate import Circulation
from autopar.passes.attention.ring import Ring


class Ulysses(Ring):
    """All ranks exchange heads for sequence."""

    name = "ulysses"
    title = "heads are exchanged for sequence, and back"
    layouts = ("contiguous", "zigzag")

    def refusal(self, problem: Problem) -> str:
        """See `AttentionAlgorithm.refusal`."""
        if problem.heads % problem.size == 0:
            return ""
        return (
            f'context_parallel: attention "{self.name}": {problem.heads} query heads do not divide over {problem.size} '
            f'ranks; it needs a multiple of {problem.size} heads: choose fewer ranks, "hybrid" or "ring"'
        )

    def head_ranks(self, problem: Problem) -> int:
        """See `AttentionAlgorithm.head_ranks`."""
        return problem.size

    def circulations(self, problem: Problem) -> tuple[Circulation, ...]:
        """See `Ring.circulations`."""
        return ()


ALGORITHMS.add(Ulysses.name, Ulysses())

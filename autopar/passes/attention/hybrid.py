"""Groups of neighbouring ranks exchange heads for sequence (Ulysses), and a ring goes round the groups; Fang and Zhao,
arXiv:2405.07719.

    8 ranks, 4 heads:   (0 1 2 3) (4 5 6 7)    inside ( ) heads for sequence; a ring of two from group to group

The ring turns in the direction in which less travels: down for a causal sequence dealt in zigzag.
"""

from __future__ import annotations

from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.problem import Problem
from autopar.passes.attention.circulate import Circulation, shorter
from autopar.passes.attention.ring import Ring


class Hybrid(Ring):
    """Heads for sequence among some ranks, a ring over the rest."""

    name = "hybrid"
    title = "heads for sequence within groups, a ring over the groups"
    layouts = ("zigzag", "contiguous")

    def refusal(self, problem: Problem) -> str:
        """See `AttentionAlgorithm.refusal`."""
        if _group_sizes(problem):
            return ""
        return (
            f'context_parallel: attention "{self.name}": needs a size of groups that divides {problem.size} ranks and '
            f'{problem.heads} query heads, and finds none but 1 and {problem.size}; choose "ring"'
        )

    def head_ranks(self, problem: Problem) -> int:
        """The largest group that needs no key heads twice, else the largest."""
        return max(_group_sizes(problem), key=lambda size: (problem.kv_heads % size == 0, size))

    def circulations(self, problem: Problem) -> tuple[Circulation, ...]:
        """See `Ring.circulations`."""
        return (shorter(problem, "columns"),)


def _group_sizes(problem: Problem) -> list[int]:
    """Proper divisors of the number of ranks that divide the query heads."""
    return [n for n in range(2, problem.size) if problem.size % n == 0 and problem.heads % n == 0]


ALGORITHMS.add(Hybrid.name, Hybrid())

"""What an algorithm of attention over ranks is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from autopar.attention.attend import Attend, Gradients
from autopar.attention.exchanges import Comm
from autopar.attention.problem import Problem


class AttentionAlgorithm(ABC):
    """A way to compute attention over ranks that each hold a part of the queries and of the keys.

    name: the option's value. title: one line for tables. layouts: how it can deal a causal sequence, best first (any
    algorithm takes any layout; these are the ones worth choosing). Forward and backward of different algorithms go
    together: both take and give what a rank holds, and nothing else is kept in between.
    """

    name: str
    title: str
    layouts: tuple[str, ...] = ("zigzag", "contiguous")

    def refusal(self, problem: Problem) -> str:
        """Why it cannot compute this; "" if it can. Says the need, the finding and the way out."""
        return ""

    def head_ranks(self, problem: Problem) -> int:
        """Among how many neighbouring ranks heads are exchanged for sequence before, and back after (Ulysses). These
        conversions stand in the graph around the algorithm, which then sees ``size / head_ranks`` ranks, each with more
        of the sequence and fewer heads (`inner_problem`). 1: none."""
        return 1

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend, comm: Comm) -> tuple[Tensor, Tensor]:
        """q [B, Hq, s, D], k [B, Hk, t, D], v [B, Hk, t, Dv] of this rank -> out [B, Hq, s, Dv] and lse [B, Hq, s] of
        its queries over all keys, sinks left out, both in the dtype of partial results (`autopar.ops.kernels.wide`)."""

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, attend: Attend, comm: Comm
    ) -> Gradients:
        """Gradients of this rank's q, k, v, given those of its ``out``; lse [B, Hq, s] is the final one of its
        queries, over all keys and sinks."""

"""The interface of an algorithm for attention over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from autopar.attention.attend import Attend, Gradients
from autopar.attention.exchanges import Comm
from autopar.attention.problem import Problem


class AttentionAlgorithm(ABC):
    """A way to compute attention over ranks that each hold a shard of the queries and of the keys.

    name: the option's value. title: one line for tables. layouts: the layouts of a causal sequence worth choosing, best
    first (any algorithm runs with any layout). Forward and backward may use different algorithms: both take and return
    what a rank holds, and nothing else is saved in between.
    """

    name: str
    title: str
    layouts: tuple[str, ...] = ("zigzag", "contiguous")

    def refusal(self, problem: Problem) -> str:
        """Why it cannot compute this, as need, finding and way out; "" if it can."""
        return ""

    def head_ranks(self, problem: Problem) -> int:
        """How many neighbouring ranks exchange heads for sequence before, and back after (Ulysses). These conversions
        stand in the graph around the algorithm, which then sees ``size / head_ranks`` ranks, each with more of the
        sequence and fewer heads (`inner_problem`). 1: none."""
        return 1

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend, comm: Comm) -> tuple[Tensor, Tensor]:
        """q [B, Hq, s, D], k [B, Hk, t, D], v [B, Hk, t, Dv] of this rank -> out [B, Hq, s, Dv] and lse [B, Hq, s] of
        its queries over all keys, without sinks, both in the dtype of partial results (`autopar.ops.kernels.wide`)."""

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, attend: Attend, comm: Comm
    ) -> Gradients:
        """Gradients of this rank's q, k, v, given those of its ``out``; lse [B, Hq, s] is the final one of its
        queries, over all keys and sinks."""

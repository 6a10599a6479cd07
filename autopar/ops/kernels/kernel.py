"""The interface of a kernel of `autopar::attention`, and the arithmetic that several of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autopar.ops.value_checks import note

if TYPE_CHECKING:
    from autopar.ops.mask_spec import MaskSpec

HALF = (torch.float16, torch.bfloat16)
NEVER = float("-inf")
HUGE = -16384.0  # log-sum-exps below this are of rows in which a bias blocks every key by a large finite number

_BLOCKED = (
    "a mask that is added to attention scores blocks every key of a row by a large finite number ({found}); such rows, "
    "and their gradients, differ from those of one process on a CPU; mask with -inf, or leave every row a key"
)

Grads = tuple[Tensor, Tensor, Tensor, Tensor | None]  # of q, k, v and, if wanted, of the bias in the bias' shape


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial results and of log-sum-exps: float32, or float64 for float64."""
    return dtype if dtype == torch.float64 else torch.float32


class Kernel(ABC):
    """One way to compute attention, without sinks.

    name: the argument of `using`. bias_gradient: whether `backward` can differentiate a bias.

    Results have q's dtype or a wider one, whichever the kernel computes; lse [B, Hq, Sq] is natural, `wide` and -inf in
    rows without any allowed key, whose out is zero. `backward` uses only rowsum(grad * out) of ``out``, and accepts lse
    and out of a larger attention, with more keys and values.
    """

    name: str
    bias_gradient = False

    @abstractmethod
    def applies(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> bool:
        """Whether it supports this."""

    def takes_documents(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> bool:
        """Whether it computes all packed documents in one call, of facts with segments."""
        return False

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> tuple[Tensor, Tensor]:
        """q [B, Hq, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv] -> out [B, Hq, Sq, Dv], lse [B, Hq, Sq]."""

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: MaskSpec, bias: bool
    ) -> Grads:
        """Gradients of q, k, v, and of the bias if ``bias``."""


def note_blocked_rows(bias: Tensor | None) -> None:
    """Warn where a bias blocks every key of a row by a large finite number: the row's log-sum-exp is that number, so
    partial results cannot be merged and probabilities cannot be recomputed from it."""
    if bias is not None and bias.numel() and not bias.is_meta:
        most = bias.detach().amax(-1)
        note(most.masked_fill(most == NEVER, 0.0), HUGE, float("inf"), _BLOCKED, fatal=False)


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """k or v with one head per query head; a single one is broadcast, not copied."""
    if x.shape[1] == 1:
        return x.expand(-1, heads, -1, -1)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def unexpand(x: Tensor, heads: int) -> Tensor:
    """The gradient of `expand_heads`: the sum over the query heads of each key head."""
    return x if x.shape[1] == heads else x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(2)


def sum_to(x: Tensor, like: Tensor) -> Tensor:
    """The gradient of a broadcast: summed over the dims of size one in ``like``."""
    x = x.sum(tuple(range(x.dim() - like.dim()))) if x.dim() > like.dim() else x
    once = tuple(d for d in range(like.dim()) if like.shape[d] == 1 and x.shape[d] != 1)
    return x.sum(once, keepdim=True) if once else x


def has_size(*tensors: Tensor) -> bool:
    """Whether no dim is empty: fused kernels do not support empty ones."""
    return all(x.numel() for x in tensors)


def four_dims(mask: Tensor) -> Tensor:
    """A mask that broadcasts to [B, Hq, Sq, Sk], with four dims."""
    return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))


def empty_rows(mask: Tensor, lse: Tensor) -> Tensor:
    """Bool in lse's shape [B, Hq, Sq]: the rows in which an additive mask leaves no key."""
    return (mask == NEVER).all(-1).expand(lse.shape)

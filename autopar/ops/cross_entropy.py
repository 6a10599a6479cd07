"""`autopar::cross_entropy`: one loss per row; everything that mixes rows (sums, counts, weights) is left outside.

The backward recomputes the softmax from the logits and the saved log-sum-exp, so that no second [N, C] tensor is
kept. Half types are computed, and their losses returned, in float32, of a block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.ops.declare import operator

BLOCK = 1 << 22  # logits that are computed with at a time


def blocks_of_rows(logits: Tensor) -> Iterator[slice]:
    """Rows [N, C] in blocks, whose temporaries are small beside the logits."""
    count = max(1, BLOCK // max(1, logits.shape[-1]))
    return (slice(i, i + count) for i in range(0, max(1, len(logits)), count))


def in_blocks(function: Callable[..., Any], dim: int, logits: Tensor, *of_rows: Tensor) -> Any:
    """What a function makes of rows, joined along a dim: a tensor, or several."""
    made = [function(logits[rows], *(x[rows] for x in of_rows)) for rows in blocks_of_rows(logits)]
    if len(made) == 1:
        return made[0]
    if isinstance(made[0], Tensor):
        return torch.cat(made, dim)
    return tuple(torch.cat(parts, dim) for parts in zip(*made, strict=True))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return dtype if dtype == torch.float64 else torch.float32


def _losses(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    x = logits.to(_wide(logits.dtype))
    lse = torch.logsumexp(x, -1)
    ignored = target == ignore_index
    chosen = x.gather(-1, target.masked_fill(ignored, 0).long().unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        chosen = (1.0 - label_smoothing) * chosen + label_smoothing * x.mean(-1)
    return (lse - chosen).masked_fill(ignored, 0.0), lse


@operator(
    "(Tensor logits, Tensor target, int ignore_index, float label_smoothing) -> (Tensor loss, Tensor lse)",
    compiled=_losses,
)
def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """logits [N, C], target [N] int -> loss [N] (0 where the target is ``ignore_index``), log-sum-exp [N].

    loss = lse - (1 - s) * logit[target] - s * mean(logits), for smoothing s.
    """
    found: tuple[Tensor, Tensor] = in_blocks(
        lambda x, t: _losses(x, t, ignore_index, label_smoothing), 0, logits, target
    )
    return found


@cross_entropy.register_fake
def _(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    shape, dtype = logits.shape[:-1], _wide(logits.dtype)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=dtype)


def gradient_in_kernel(
    grad: Tensor, logits: Tensor, index: Tensor, lse: Tensor, label_smoothing: float, classes: int
) -> Tensor:
    """Gradient of logits [N, C], of ``classes`` in all, element by element: a compiler reads the logits once. ``index``
    [N]: of the target among these, out of range if it is none of them."""
    softmax = (logits - lse.unsqueeze(-1)).exp()
    if label_smoothing:
        softmax = softmax - label_smoothing / classes
    hit = torch.arange(logits.shape[-1], device=logits.device) == index.unsqueeze(-1)
    made = torch.where(hit, softmax + (label_smoothing - 1.0), softmax) * grad.unsqueeze(-1)
    return made.to(logits.dtype)


def _backward_in_kernel(
    grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    kept = grad.masked_fill(target == ignore_index, 0.0)
    return gradient_in_kernel(kept, logits, target, lse, label_smoothing, logits.shape[-1])


@operator(
    "(Tensor grad, Tensor logits, Tensor target, Tensor lse, int ignore_index, float label_smoothing) -> Tensor",
    lambda grad, logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
    compiled=_backward_in_kernel,
)
def cross_entropy_backward(
    grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    """grad [N] of the losses -> gradient of the logits [N, C]: grad * (softmax - (1 - s) * onehot - s / C)."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for rows in blocks_of_rows(logits):
        made = minus(logits[rows], lse[rows], out[rows]).exp_()
        ignored = target[rows] == ignore_index
        index = target[rows].masked_fill(ignored, 0).long().unsqueeze(-1)
        if label_smoothing:
            made -= label_smoothing / logits.shape[-1]
        made.scatter_add_(-1, index, torch.full_like(made[:, :1], label_smoothing - 1.0))
        made *= grad[rows].masked_fill(ignored, 0.0).unsqueeze(-1)
        out[rows] = made
    return out


def minus(logits: Tensor, lse: Tensor, out: Tensor) -> Tensor:
    """Their difference in the dtype of lse: in the memory of ``out``, if it is of this dtype."""
    return torch.sub(logits, lse.unsqueeze(-1), out=out if out.dtype == lse.dtype else None)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, ctx.ignore_index, ctx.label_smoothing = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_lse: None) -> tuple[Any, ...]:
    if grad is None:
        return None, None, None, None
    logits, target, lse = ctx.saved_tensors
    out = torch.ops.autopar.cross_entropy_backward(grad, logits, target, lse, ctx.ignore_index, ctx.label_smoothing)
    return out, None, None, None


cross_entropy.register_autograd(_backward, setup_context=_setup)

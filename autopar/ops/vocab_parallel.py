"""Embedding and loss over a sharded vocabulary: what a rank with some of the rows or classes computes.

The loss never gathers logits: per row it reduces a maximum, and a sum of two or three numbers (Megatron-LM's vocab
parallel cross-entropy). Source: Shoeybi et al., Megatron-LM, section 3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import autopar.ops.collectives  # noqa: F401  (registers the raw collectives)
from autopar.ops.cross_entropy import blocks_of_rows, gradient_in_kernel, in_blocks, minus
from autopar.ops.declare import operator
from autopar.ops.padded_pieces import cropped_size, real_rows


def first_row(rows: int, axis: str, size: int, device: torch.device) -> Tensor:
    """[1]: the global index of the first of the ``rows`` rows that this rank holds."""
    starts = torch.arange(0, rows * size, rows, device=device)
    out: Tensor = torch.ops.autopar.shard_slice(starts, 0, [], axis, size)
    return out


def embedding_of_piece(
    weight: Tensor, indices: Tensor, padding_idx: int, axis: str, size: int, name: str = "an embedding", units: int = 0
) -> Tensor:
    """Rows of a sharded table: weight [V/size, H], indices [...] global -> [..., H], zero if another rank has the row.

    The sum over ranks is the embedding. As in torch, the row ``padding_idx`` gets no gradient. An index out of range is
    an error that names ``name``, reported after the step (`autopar.ops.value_checks`). ``units``: of padded pieces; no
    index is that of a row of padding.
    """
    rows = weight.shape[0]
    last = cropped_size(rows * size, units, size) - 1
    text = f"{name} must lie in 0 .. {last}, the rows of its embedding, found {{found}}"
    watched = torch.ops.autopar.watch(indices, 0.0, float(last), None, text, True)
    local = watched - first_row(rows, axis, size, indices.device)
    outside = (local < 0) | (local >= rows)
    out = torch.nn.functional.embedding(local.clamp(0, rows - 1), weight)
    if padding_idx >= 0:
        out = torch.where((indices == padding_idx).unsqueeze(-1), out.detach(), out)
    return out.masked_fill(outside.unsqueeze(-1), 0.0)


def cross_entropy_of_piece(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    axis: str,
    size: int,
    name: str = "labels of a cross-entropy",
    units: int = 0,
) -> tuple[Tensor, Tensor]:
    """`autopar::cross_entropy` of a rank that holds classes: logits [N, C/size], target [N] -> loss [N], lse [N].

    A label out of range is an error that names ``name``, reported after the step (`autopar.ops.value_checks`).
    ``units``: of padded pieces; padding is no class.
    """
    classes = cropped_size(logits.shape[-1] * size, units, size)
    real = real_rows([], axis, size, units, classes, logits.device) if units else None
    out: tuple[Tensor, Tensor] = _CrossEntropy.apply(
        logits, target, ignore_index, label_smoothing, axis, size, name, classes, real
    )
    return out


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        ignore_index: int,
        label_smoothing: float,
        axis: str,
        size: int,
        name: str,
        classes: int,
        real: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ops = torch.ops.autopar
        text = f"{name} must lie in 0 .. {classes - 1}, or be {ignore_index}, found {{found}}"
        watched = ops.watch(target, 0.0, float(classes - 1), ignore_index, text, True)
        index = watched - first_row(logits.shape[-1], axis, size, target.device)
        index = index.masked_fill(target == ignore_index, -1)
        padding = () if real is None else (real,)
        top = ops.all_reduce(ops.piece_max(logits, *padding), axis, "max")
        sums = ops.piece_sums(logits, index, top, classes, *padding)
        total, chosen, mean = ops.all_reduce(sums, axis, "sum").unbind(0)
        lse = top + total.log()
        loss = lse - (1 - label_smoothing) * chosen - label_smoothing * mean
        ctx.facts = label_smoothing, classes, ignore_index
        ctx.save_for_backward(logits, index, target, lse, *padding)
        ctx.mark_non_differentiable(lse)
        return loss.masked_fill(target == ignore_index, 0.0), lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        logits, index, target, lse, *padding = ctx.saved_tensors
        label_smoothing, classes, ignore_index = ctx.facts
        grad = grad.masked_fill(target == ignore_index, 0.0)
        out = torch.ops.autopar.piece_backward(grad, logits, index, lse, label_smoothing, classes, *padding)
        return out, *[None] * 8


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _greatest(logits: Tensor, real: Tensor | None = None) -> Tensor:
    classes = logits if real is None else torch.where(real, logits, -math.inf)
    return classes.amax(-1).to(_wide(logits.dtype))


@operator(fake=lambda logits, *_: logits.new_empty(logits.shape[:-1], dtype=_wide(logits.dtype)), compiled=_greatest)
def piece_max(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """[N, C] -> [N]: the greatest logit among the rank's classes, in the dtype of sums. ``real`` [C] bool: which
    columns are classes; the others are padding."""
    if real is None:
        return _greatest(logits)
    found: Tensor = in_blocks(lambda x: _greatest(x, real), 0, logits)
    return found


def _sums(logits: Tensor, index: Tensor, top: Tensor, classes: int, real: Tensor | None = None) -> Tensor:
    x = logits.to(top.dtype)
    inside = (index >= 0) & (index < x.shape[-1])
    chosen = x.gather(-1, index.clamp(0, x.shape[-1] - 1).unsqueeze(-1)).squeeze(-1).masked_fill(~inside, 0.0)
    exp = (x - top.unsqueeze(-1)).exp()
    if real is not None:
        exp, x = torch.where(real, exp, 0.0), torch.where(real, x, 0.0)
    return torch.stack([exp.sum(-1), chosen, x.sum(-1) / classes])


@operator(fake=lambda logits, index, top, *_: top.new_empty((3, *top.shape)), compiled=_sums)
def piece_sums(logits: Tensor, index: Tensor, top: Tensor, classes: int, real: Tensor | None = None) -> Tensor:
    """[N, C], local target index [N] (out of range: another rank's) -> [3, N]: sum of exp(logit - top), the target's
    logit, the rank's share of the mean logit over all ``classes``. ``real`` as in `piece_max`."""
    found: Tensor = in_blocks(lambda x, i, t: _sums(x, i, t, classes, real), 1, logits, index, top)
    return found


def _gradient(
    grad: Tensor, logits: Tensor, index: Tensor, lse: Tensor, label_smoothing: float, classes: int,
    real: Tensor | None = None,
) -> Tensor:  # fmt: skip
    made = gradient_in_kernel(grad, logits, index, lse, label_smoothing, classes)
    return made if real is None else torch.where(real, made, 0.0)


@operator(fake=lambda grad, logits, *_: torch.empty_like(logits), compiled=_gradient)
def piece_backward(
    grad: Tensor, logits: Tensor, index: Tensor, lse: Tensor, label_smoothing: float, classes: int,
    real: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gradient of the rank's logits: grad * (softmax - (1 - s) * onehot - s / classes), zero in padding."""
    out = torch.empty_like(logits)
    for rows in blocks_of_rows(logits):
        made = minus(logits[rows], lse[rows], out[rows]).exp_()
        inside = (index[rows] >= 0) & (index[rows] < made.shape[-1])
        if label_smoothing:
            made -= label_smoothing / classes
        hit = (inside.to(made.dtype) * (label_smoothing - 1.0)).unsqueeze(-1)
        made.scatter_add_(-1, index[rows].clamp(0, made.shape[-1] - 1).unsqueeze(-1), hit)
        made *= grad[rows].unsqueeze(-1)
        out[rows] = made if real is None else made.masked_fill_(~real, 0.0)
    return out

"""Grouped products of eight-bit operands: rows of experts times the matrix of each one's expert, as `scaled_products`.

A row of tokens is an expert's by routing, so no scale may span rows of several experts. Each of the three products has
one scale for each row of its left factor and each column of its right one, a power of two, whatever the policy's
scaling is; "block" has one for each 32 numbers in a row along what is contracted.

    y  = x  wᵀ      contracts inner              sx per token                sw per expert and output
    dx = dy w       contracts columns            sy per token                sw per expert and input
    dw = dyᵀ x      contracts an expert's rows   sy per expert and output    sx per expert and input

Where ranks hold shards of what a scale spans they agree on it. With blocks dw is wide: 32 rows would be of several
experts. (torchao's training of mixtures of experts, `MoETrainingConfig`, scales alike.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import autopar.ops.grouped_experts  # noqa: F401  (registers the wide products)
from autopar.ops.declare import operator
from autopar.ops.few_bits.scaled_products import BLOCK, MULTIPLE, VALUES, _quantized, _shared, _wide, scaled
from autopar.ops.grouped_experts import expert_of_row
from autopar.ops.kernels.chips import chip_of

ops = torch.ops.autopar


# --- operators -------------------------------------------------------------------------------------------------


def _by_group_fake(x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty((offsets.shape[0], x.shape[1]), dtype=_wide(x.dtype))


@operator(fake=_by_group_fake)
def largest_by_group(x: Tensor, offsets: Tensor) -> Tensor:
    """x [n, c], offsets [E] -> the greatest magnitude of each column over an expert's rows, [E, c]; 0 without rows."""
    found = x.new_zeros((offsets.shape[0] + 1, x.shape[1]), dtype=_wide(x.dtype))  # the last: rows of no expert
    expert = expert_of_row(x, offsets).unsqueeze(1).expand_as(x)
    return found.scatter_reduce_(0, expert, x.abs().to(found.dtype), "amax")[:-1].contiguous()


@operator(
    fake=lambda x, scale, offsets, format: torch.empty_like(x, dtype=format, memory_format=torch.contiguous_format)
)
def quantized_by_group(x: Tensor, scale: Tensor, offsets: Tensor, format: torch.dtype) -> Tensor:
    """x [n, c] / the scale [E, c] of each row's expert, rounded to a format."""
    return _quantized(x, _of_rows(scale, x, offsets), format).contiguous()


def _of_rows(scale: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """[E, c] -> [n, c]; rows of no expert have the scale of the last one, and no product reads them."""
    return scale.index_select(0, expert_of_row(x, offsets).clamp_(max=offsets.shape[0] - 1))


def _dequantized(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    for dim, (size, scales) in enumerate(zip(x.shape, scale.shape, strict=True)):
        if 1 < scales < size:
            scale = scale.repeat_interleave(BLOCK, dim)
    return x.to(dtype) * scale.to(dtype)


def _summed_in(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Scales are powers of two: operands are exact in bfloat16, whose products GPUs sum in float32."""
    return dtype if x.is_cuda else _wide(dtype)


def _has_kernel(rows: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch's grouped kernel takes the product: one scale for each row, sizes in multiples of 16, on Hopper."""
    fits = rows.shape[0] > 0 and scale.shape[1] == 1 and not any(n % MULTIPLE["row"] for n in weight.shape[1:])
    if not (rows.is_cuda and dtype == torch.bfloat16 and fits):
        return False
    chip = chip_of(rows.device)
    return not chip.rocm and chip.capability == (9, 0)


def product(
    rows: Tensor, weight: Tensor, scale_rows: Tensor, scale_weight: Tensor, offsets: Tensor, transposed: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The kernel of `scaled_grouped_mm`."""
    if _has_kernel(rows, weight, scale_rows, dtype):
        matrices = weight.transpose(1, 2) if transposed else weight  # [E, o, i]
        of_rows, of_columns = scale_rows.flatten().contiguous(), scale_weight.reshape(len(weight), -1).contiguous()
        columns = matrices.contiguous().transpose(1, 2)
        out: Tensor = torch.ops.aten._scaled_grouped_mm(
            rows.contiguous(), columns, of_rows, of_columns, offsets, None, None, dtype
        )
        return out.masked_fill_((expert_of_row(out, offsets) == len(weight)).unsqueeze(-1), 0.0)
    wide = _summed_in(rows, dtype)
    out = ops.grouped_mm(
        _dequantized(rows, scale_rows, wide), _dequantized(weight, scale_weight, wide), offsets, transposed
    )
    return out.to(dtype)


@operator(
    fake=lambda rows, weight, scale_rows, scale_weight, offsets, transposed, dtype: rows.new_empty(
        (rows.shape[0], weight.shape[2 if transposed else 1]), dtype=dtype
    )
)
def scaled_grouped_mm(
    rows: Tensor, weight: Tensor, scale_rows: Tensor, scale_weight: Tensor, offsets: Tensor, transposed: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`grouped_mm` of float8 rows [n, i] and weight [E, o, i], or [E, i, o] if ``transposed``, with scales of their
    shapes, but 1, or i / 32 of blocks, in place of i -> [n, o] in ``dtype``. Rows after the last offset give zero.

    Sums are in float32, in float64 for float64. On Hopper torch's kernel, for one scale a row; elsewhere the wide
    product of the dequantized operands.
    """
    return product(rows, weight, scale_rows, scale_weight, offsets, transposed, dtype)


@operator(
    fake=lambda grad, rows, scale_grad, scale_rows, offsets, transposed, dtype: grad.new_empty(
        (
            len(offsets),
            *((rows, grad) if transposed else (grad, rows))[0].shape[1:],
            (grad if transposed else rows).shape[1],
        ),
        dtype=dtype,
    )
)
def scaled_grouped_mm_weight_grad(
    grad: Tensor, rows: Tensor, scale_grad: Tensor, scale_rows: Tensor, offsets: Tensor, transposed: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`grouped_mm_weight_grad` of float8 grad [n, o] and rows [n, i] with scales [E, o] and [E, i], in ``dtype``. The
    product of the dequantized operands on every device: torch's kernel needs groups of 16 rows."""
    wide = _summed_in(rows, dtype)
    left, right = (x.to(wide) * _of_rows(s, x, offsets).to(wide) for x, s in ((grad, scale_grad), (rows, scale_rows)))
    return ops.grouped_mm_weight_grad(left, right, offsets, transposed).to(dtype)


# --- a layer ---------------------------------------------------------------------------------------------------


def scaled_experts(
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    transposed: bool,
    scaling: str,
    wide_weight_gradient: bool = False,
    tokens: Sequence[str] = (),
    inner: Sequence[str] = (),
    columns: Sequence[str] = (),
    pending: Sequence[str] = (),
    rows_shares: Sequence[int] = (),
    weight_shares: Sequence[int] = (),
) -> Tensor:
    """`grouped_mm` whose products, forward and backward, are of float8: rows [n, i], weight [E, o, i] or [E, i, o] if
    ``transposed``, offsets [E] -> [n, o].

    scaling: "block", or anything else for scales of rows. tokens, inner, columns: the axes that shard an expert's rows,
    i and o. The rest is as in `autopar.ops.few_bits.scaled_products.scaled_linear`.
    """
    how = (transposed, scaling, wide_weight_gradient, list(tokens), list(inner), list(columns))
    shares = list(rows_shares), list(weight_shares)
    out: Tensor = _ScaledExperts.apply(rows, weight, offsets, *how, list(pending), *shares)
    return out


def _rounded(x: Tensor, along: int, scaling: str, axes: Sequence[str]) -> tuple[Tensor, Tensor]:
    """(x in float8, scales with 1, or a 32nd of it, in place of dim ``along``), agreed over ``axes``."""
    if scaling != "block":
        return scaled(x, [along], axes, VALUES, True)
    shape, size = list(x.shape), x.shape[along]
    q, scale = scaled(
        x.reshape(*shape[:along], size // BLOCK, BLOCK, *shape[along + 1 :]), [along + 1], (), VALUES, True
    )
    return q.view(shape), scale.squeeze(along + 1)


def _rounded_by_group(x: Tensor, offsets: Tensor, axes: Sequence[str]) -> tuple[Tensor, Tensor]:
    """(x in float8, scales [E, c])"""
    magnitude = ops.largest_by_group(x, offsets)
    for axis in axes:
        magnitude = ops.all_reduce(magnitude, axis, "max")
    scale = ops.scale_of(magnitude, VALUES, True)
    return ops.quantized_by_group(x, scale, offsets, VALUES), scale


class _ScaledExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor, transposed: bool, scaling: str, wide: bool,
        tokens: list[str], inner: list[str], columns: list[str], *sums: list[Any],
    ) -> Tensor:  # fmt: skip
        ctx.facts = transposed, scaling, wide, tokens, columns, sums
        ctx.save_for_backward(rows, weight, offsets)
        (q, s), (qw, sw) = _rounded(rows, 1, scaling, inner), _rounded(weight, 1 if transposed else 2, scaling, inner)
        return ops.scaled_grouped_mm(q, qw, s, sw, offsets, transposed, rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        transposed, scaling, wide, tokens, columns, (pending, *shares) = ctx.facts
        rows, weight, offsets = ctx.saved_tensors
        to_rows = to_weight = None
        for axis in pending:
            grad = ops.all_reduce(grad, axis, "sum")
        if ctx.needs_input_grad[0]:
            (q, s), (qw, sw) = (
                _rounded(grad, 1, scaling, columns),
                _rounded(weight, 2 if transposed else 1, scaling, columns),
            )
            to_rows = ops.scaled_grouped_mm(q, qw, s, sw, offsets, not transposed, rows.dtype)
        if ctx.needs_input_grad[1] and (wide or scaling == "block"):
            to_weight = ops.grouped_mm_weight_grad(grad, rows, offsets, transposed)
        elif ctx.needs_input_grad[1]:
            (qy, sy), (q, s) = _rounded_by_group(grad, offsets, tokens), _rounded_by_group(rows, offsets, tokens)
            to_weight = ops.scaled_grouped_mm_weight_grad(qy, q, sy, s, offsets, transposed, rows.dtype)
        found = [_shared(g, sizes) for g, sizes in zip((to_rows, to_weight), shares, strict=True)]
        return *found, *[None] * 10

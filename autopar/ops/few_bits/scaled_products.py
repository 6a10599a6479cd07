"""Products of eight-bit operands: y = x wᵀ with x ≈ sx·qx and w ≈ sw·qw, where qx and qw are float8.

A scale is the greatest magnitude of a tensor over the greatest number of the format (dynamic scaling: of this very
tensor). Scaling "tensor" has one scale per operand. Scaling "row" has one for each row of the left factor and each
column of the right one, a power of two: of the three products of a layer each scales along what it contracts. Scaling
"block" (OCP Microscaling Formats 1.0, mxfp8) has one for each 32 numbers in a row along what is contracted, a power of
two that is rounded up, as NVIDIA's kernels and torchao's RCEIL do.

    y  = x  wᵀ      contracts inner      sx per token     sw per output
    dx = dy w       contracts columns    sy per token     sw per input
    dw = dyᵀ x      contracts rows       sy per output    sx per input

Where ranks hold shards of what a scale spans, they agree on it: an all-reduce of maxima. So a shard is quantized to the
very numbers that it has in the whole. Formats as in NVIDIA's Transformer Engine and torchao: e4m3 for values; gradients
in e5m2 with one scale per tensor, else in e4m3. (Micikevicius et al. 2022, FP8 formats for deep learning.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import autopar.ops.collectives  # noqa: F401  (registers the raw collectives)
from autopar.ops.declare import operator
from autopar.ops.few_bits.delayed_scales import scales_in_use
from autopar.ops.kernels.chips import chip_of

VALUES = torch.float8_e4m3fn
GRADIENTS = {"tensor": torch.float8_e5m2, "row": torch.float8_e4m3fn}
BLOCK = 32
SMALLEST = 2.0**-100  # magnitudes below count as zero: their scales would be no normal numbers
MULTIPLE = {"tensor": 16, "delayed": 16, "row": 16, "block": BLOCK}  # of the dims that kernels take
ops = torch.ops.autopar


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


# --- operators -------------------------------------------------------------------------------------------------


def _largest(x: Tensor, dims: Sequence[int]) -> Tensor:
    shape = [1 if i in dims else n for i, n in enumerate(x.shape)]
    if not x.numel():
        return x.new_zeros(shape, dtype=_wide(x.dtype))
    return x.abs().amax(list(dims), keepdim=True).to(_wide(x.dtype))


def _largest_fake(x: Tensor, dims: Sequence[int]) -> Tensor:
    return x.new_empty([1 if i in dims else n for i, n in enumerate(x.shape)], dtype=_wide(x.dtype))


@operator(fake=_largest_fake, compiled=_largest)
def largest(x: Tensor, dims: list[int]) -> Tensor:
    """The greatest magnitude over some dims, which stay with size one, in float32 or wider. 0 of no elements."""
    return _largest(x, dims)


def _scale_of(magnitude: Tensor, format: torch.dtype, power_of_two: bool) -> Tensor:
    top = torch.finfo(format).max
    scale = torch.where(magnitude < SMALLEST, torch.ones_like(magnitude), magnitude / top)
    if not power_of_two:
        return scale
    integer, bits = (torch.int64, 52) if scale.dtype == torch.float64 else (torch.int32, 23)
    mantissa = (1 << bits) - 1  # if any of its bits is set, adding all of them carries over to the exponent
    up = ((scale.view(integer) + mantissa) >> bits << bits).view(scale.dtype)
    return torch.where(scale.isfinite(), up, scale)


@operator(fake=lambda magnitude, *_: torch.empty_like(magnitude), compiled=_scale_of)
def scale_of(magnitude: Tensor, format: torch.dtype, power_of_two: bool) -> Tensor:
    """The scale that maps a magnitude to the greatest number of a format; or the next power of two above it."""
    return _scale_of(magnitude, format, power_of_two)


@operator(
    schema="(Tensor own, str[] axes, str operand, ScalarType format) -> Tensor",
    fake=lambda own, *_: torch.empty_like(own),
)
def delayed_scale(own: Tensor, axes: list[str], operand: str, format: torch.dtype) -> Tensor:
    """The scale [1, 1] of an operand from earlier steps; notes the magnitude of a rank's shard for later ones. ``axes``
    shard the operand. Equal on all ranks."""
    return _scale_of(scales_in_use().magnitude(own, axes, operand), format, False)


def _quantized(x: Tensor, scale: Tensor, format: torch.dtype) -> Tensor:
    top = torch.finfo(format).max
    return (x.to(scale.dtype) / scale).clamp(-top, top).to(format)


@operator(
    fake=lambda x, scale, format: torch.empty_like(x, dtype=format, memory_format=torch.contiguous_format),
    compiled=lambda x, scale, format: _quantized(x, scale, format).contiguous(),
)
def quantized(x: Tensor, scale: Tensor, format: torch.dtype) -> Tensor:
    """x / scale, rounded to a format, contiguous. What does not fit becomes its greatest number; NaN stays NaN."""
    return _quantized(x, scale, format).contiguous()


def _scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    by_row = scale_a.numel() > 1 or scale_b.numel() > 1
    if scale_a.shape[1] > 1 or scale_b.shape[0] > 1:
        wide = _wide(dtype)
        scale_a, scale_b = scale_a.repeat_interleave(BLOCK, 1), scale_b.repeat_interleave(BLOCK, 0)
        return ((a.to(wide) * scale_a) @ (b.to(wide) * scale_b)).to(dtype)
    if not _has_kernel(a, b, dtype, by_row):
        wide = _wide(dtype)
        return ((a.to(wide) * scale_a) @ (b.to(wide) * scale_b)).to(dtype)
    if by_row:
        scale_a, scale_b = scale_a.expand(a.shape[0], 1).contiguous(), scale_b.expand(1, b.shape[1]).contiguous()
    return torch._scaled_mm(a.contiguous(), b.t().contiguous().t(), scale_a, scale_b, out_dtype=dtype)


def _has_kernel(a: Tensor, b: Tensor, dtype: torch.dtype, by_row: bool) -> bool:
    """Whether torch's kernel for GPUs takes the product: rows of a, columns of b, sizes in multiples of 16. On the CPU
    torch dequantizes as well: results are bitwise equal."""
    fits = a.shape[0] > 0 and not any(n % MULTIPLE["tensor"] for n in b.shape) and VALUES in (a.dtype, b.dtype)
    return a.is_cuda and dtype == torch.bfloat16 and fits and chip_of(a.device).multiplies_float8(by_row)


@operator(
    fake=lambda a, b, scale_a, scale_b, dtype: a.new_empty((a.shape[0], b.shape[1]), dtype=dtype), compiled=_scaled_mm
)
def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """(scale_a a) (scale_b b): a [m, k], b [k, n] of float8, scales [1 or m, 1] and [1, 1 or n], or [m, k / 32] and
    [k / 32, n] of blocks -> [m, n] in ``dtype``.

    Sums are in float32, in float64 for float64. On a GPU with float8 torch's kernel, for bfloat16 and sizes that it
    takes; elsewhere, and for blocks, the product of the dequantized operands: torch's on the CPU, to the bit where its
    kernel sums in the same order (not on those with AMX).
    """
    return _scaled_mm(a, b, scale_a, scale_b, dtype)


# --- a layer ---------------------------------------------------------------------------------------------------

ALL = [0, 1]


def scaled(
    x: Tensor, dims: list[int], axes: Sequence[str], format: torch.dtype, power_of_two: bool, operand: str = ""
) -> tuple[Any, Any]:
    """(x in a format, its scale) for x [m, n]: one scale over ``dims``, agreed over the ranks of ``axes``; by earlier
    magnitudes of an ``operand`` that has a name."""
    magnitude = ops.largest(x, dims)
    if operand:
        scale = ops.delayed_scale(magnitude, list(axes), operand, format)
        return ops.quantized(x, scale, format), scale
    for axis in axes:
        magnitude = ops.all_reduce(magnitude, axis, "max")
    scale = ops.scale_of(magnitude, format, power_of_two)
    return ops.quantized(x, scale, format), scale


def in_blocks(x: Tensor, along: int) -> tuple[Tensor, Tensor]:
    """(float8 [m, n], scales [m, n / 32] for along=1, [m / 32, n] for along=0) of x [m, n]. Shards hold whole blocks,
    so ranks need not agree."""
    m, n = x.shape
    blocks = x.reshape(m, n // BLOCK, BLOCK) if along else x.reshape(m // BLOCK, BLOCK, n)
    q, scale = scaled(blocks, [1 + along], (), VALUES, True)
    return q.view(m, n), scale.squeeze(1 + along)


def scaled_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scaling: str,
    wide_weight_gradient: bool = False,
    rows: Sequence[str] = (),
    inner: Sequence[str] = (),
    columns: Sequence[str] = (),
    pending: Sequence[str] = (),
    input_shares: Sequence[int] = (),
    weight_shares: Sequence[int] = (),
    misfit: str = "",
    operands: Sequence[str] = ("", "", ""),
) -> Tensor:
    """A linear layer whose products, forward and backward, are of float8: [..., k], [n, k], [n] -> [..., n].

    scaling: "tensor", "delayed", "row" or "block". wide_weight_gradient: dw in the dtype of the input. rows, inner,
    columns: the axes that shard tokens, k and n. pending: axes over which the gradient of the result arrives in
    addends, which are added before it is quantized; each rank then passes on its share of what the ranks compute alike,
    one of ``input_shares`` and ``weight_shares``. misfit: why tokens make no blocks; it is raised where they are
    needed. operands: the names of input, weight and gradient, which delayed scales are by.
    """
    how = (scaling, wide_weight_gradient, list(rows), list(inner), list(columns))
    shares = list(input_shares), list(weight_shares)
    out: Tensor = _ScaledLinear.apply(input, weight, *how, list(operands), list(pending), *shares, misfit)
    return out if bias is None else out + bias


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, scaling: str, wide: bool, rows: list[str], inner: list[str],
        columns: list[str], operands: list[str], *sums: list[Any],
    ) -> Tensor:  # fmt: skip
        x2, by_row = x.reshape(-1, x.shape[-1]), scaling == "row"
        ctx.facts = scaling, wide, rows, columns, operands[2], sums
        if scaling == "block":
            (qx, sx), (qw, sw) = in_blocks(x2, 1), in_blocks(w, 1)
            ctx.save_for_backward(x2, w)
            return ops.scaled_mm(qx, qw.t(), sx, sw.t(), x.dtype).view(*x.shape[:-1], w.shape[0])
        along = [1] if by_row else ALL
        qx, sx = scaled(x2, along, inner if by_row else [*rows, *inner], VALUES, by_row, operands[0])
        qw, sw = scaled(w, along, inner if by_row else [*columns, *inner], VALUES, by_row, operands[1])
        ctx.save_for_backward(*((x2, w) if by_row else (qx, sx, qw, sw, *([x2] if wide else []))))
        return ops.scaled_mm(qx, qw.t(), sx, sw.t(), x.dtype).view(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        scaling, wide, rows, columns, operand, (pending, *shares, misfit) = ctx.facts
        for axis in pending:
            grad = ops.all_reduce(grad, axis, "sum")
        y, needs = grad.reshape(-1, grad.shape[-1]), ctx.needs_input_grad[:2]
        if scaling == "block":
            dx, dw = _by_block(y, ctx.saved_tensors, needs, wide, misfit)
        elif scaling == "row":
            dx, dw = _by_row(y, ctx.saved_tensors, needs, wide, rows, columns)
        else:
            dx, dw = _by_tensor(y, ctx.saved_tensors, needs, wide, [*rows, *columns], operand)
        found = [_shared(g, sizes) for g, sizes in zip((dx, dw), shares, strict=True)]
        return found[0] if dx is None else found[0].view(*grad.shape[:-1], -1), found[1], *[None] * 10


def _shared(gradient: Tensor | None, sizes: Sequence[int]) -> Any:
    """A rank's share of a gradient that all ranks of some axes have computed alike."""
    for size in sizes:
        gradient = gradient / size if gradient is not None else None
    return gradient


Pair = tuple[Tensor | None, Tensor | None]
Needs = Sequence[bool]


def _by_tensor(y: Tensor, saved: Any, needs: Needs, wide: bool, axes: list[str], operand: str) -> Pair:
    qx, sx, qw, sw, *x2 = saved
    qy, sy = scaled(y, ALL, axes, GRADIENTS["tensor"], False, operand)
    dx = ops.scaled_mm(qy, qw, sy, sw, y.dtype) if needs[0] else None
    if not needs[1]:
        return dx, None
    return dx, y.t() @ x2[0] if wide else ops.scaled_mm(qy.t(), qx, sy, sx, y.dtype)


def _by_row(y: Tensor, saved: Any, needs: Needs, wide: bool, rows: list[str], columns: list[str]) -> Pair:
    (x2, w), dx, dw = saved, None, None
    if needs[0]:
        qy, sy = scaled(y, [1], columns, GRADIENTS["row"], True)
        qw, sw = scaled(w, [0], columns, VALUES, True)
        dx = ops.scaled_mm(qy, qw, sy, sw, y.dtype)
    if needs[1] and wide:
        dw = y.t() @ x2
    elif needs[1]:
        qy, sy = scaled(y, [0], rows, GRADIENTS["row"], True)
        qx, sx = scaled(x2, [0], rows, VALUES, True)
        dw = ops.scaled_mm(qy.t(), qx, sy.t(), sx, y.dtype)
    return dx, dw


def _by_block(y: Tensor, saved: Any, needs: Needs, wide: bool, misfit: str) -> Pair:
    (x2, w), dx, dw = saved, None, None
    if needs[0]:
        (qy, sy), (qw, sw) = in_blocks(y, 1), in_blocks(w, 0)
        dx = ops.scaled_mm(qy, qw, sy, sw, y.dtype)
    if needs[1] and wide:
        dw = y.t() @ x2
    elif needs[1]:
        if misfit or len(y) % BLOCK:
            raise ValueError(misfit or token_misfit(f"{len(y)} tokens"))
        (qy, sy), (qx, sx) = in_blocks(y, 0), in_blocks(x2, 0)
        dw = ops.scaled_mm(qy.t(), qx, sy.t(), sx, y.dtype)
    return dx, dw


def token_misfit(found: str) -> str:
    """The refusal of tokens that make no blocks."""
    return (
        f"precision: gradients of weights are scaled in blocks of {BLOCK} tokens of a row, found {found}; use lengths "
        "that are multiples on each rank, wide_weight_gradient=True, or name the module in precision.wide"
    )

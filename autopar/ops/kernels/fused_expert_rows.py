"""Rows of experts on a GPU: each is read once and written once, by one kernel per operator.

The arithmetic is that of `autopar.ops.grouped_experts`: products and sums in float32 (float64 for float64), rounded
once. Rows of no expert, and matrices of experts without rows, are zeroed without touching the others: where there are
none a kernel reads the ends of experts and returns. Importing this file needs Triton, which comes with torch's builds
for CUDA; with TRITON_INTERPRET=1 the kernels run on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDEST = 1024  # columns that a program reads at once
_BLOCK = 4096  # elements that a program zeroes at once
_PROGRAMS = 264  # of a kernel whose work is known on the device only


@triton.jit
def _plus(a, b):  # type: ignore[no-untyped-def]
    return a + b


@triton.jit
def _sum_rows(  # type: ignore[no-untyped-def]
    out, rows, place, weights, width, K: tl.constexpr, DOUBLE: tl.constexpr, COLUMNS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.full([COLUMNS], 0.0, tl.float64 if DOUBLE else tl.float32)
    for k in range(0, K):
        at = tl.load(place + token * K + k)
        row = tl.load(rows + at * width + column, mask=(column < width) & (at >= 0), other=0.0).to(total.dtype)
        if weights is not None:
            row *= tl.load(weights + token * K + k, mask=at >= 0, other=0.0).to(total.dtype)
        total += row
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _spread_rows(  # type: ignore[no-untyped-def]
    rows_grad, weights_grad, grad, rows, order, weights, width,
    K: tl.constexpr, DOUBLE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(order + row)
    token = pair // K
    wide = tl.float64 if DOUBLE else tl.float32
    weight = tl.load(weights + pair).to(wide)
    total = tl.full([COLUMNS], 0.0, wide)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        given = tl.load(grad + token * width + column, mask=column < width, other=0.0).to(wide)
        made = tl.load(rows + row * width + column, mask=column < width, other=0.0).to(wide)
        total += given * made
        tl.store(rows_grad + row * width + column, (given * weight).to(rows_grad.dtype.element_ty), mask=column < width)
    tl.store(weights_grad + pair, tl.reduce(total, 0, _plus).to(weights_grad.dtype.element_ty))


@triton.jit
def _clear_rows(out, last, rows, width, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    for row in range(tl.load(last).to(tl.int64) + tl.program_id(0), rows, tl.num_programs(0)):
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            zeros = tl.full([COLUMNS], 0.0, out.dtype.element_ty)
            tl.store(out + row * width + column, zeros, mask=column < width)


@triton.jit
def _clear_experts(out, ends, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    expert = tl.program_id(0).to(tl.int64)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends + expert) == first:
        for start in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            zeros = tl.full([BLOCK], 0.0, out.dtype.element_ty)
            tl.store(out + expert * size + at, zeros, mask=at < size)


def summed(rows: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
    """rows [n, H], place [T, K] int64 (-1: no row), weights [T, K] or None: ones -> [T, H], sums over K."""
    (tokens, k), width = place.shape, rows.shape[1]
    out = rows.new_empty(tokens, width)
    if out.numel():
        columns = min(triton.next_power_of_2(width), _WIDEST)
        with torch.cuda.device_of(out):
            _sum_rows[(tokens, triton.cdiv(width, columns))](
                out, rows.contiguous(), place, None if weights is None else weights.contiguous(), width, K=k,
                DOUBLE=_double(rows, weights), COLUMNS=columns,
            )  # fmt: skip
    return out


def spread(grad: Tensor, rows: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """grad [T, H], rows [n, H], order [n] of T * K pairs, weights [T, K] -> each row's share of its token's gradient
    [n, H], and the gradient of the weights [T, K]: zeros for pairs without a row."""
    rows_grad = torch.empty_like(rows, memory_format=torch.contiguous_format)
    whole = order.shape[0] == weights.numel() and rows.shape[1] > 0
    weights_grad = (weights.new_empty if whole else weights.new_zeros)(weights.shape)
    if rows.numel():
        with torch.cuda.device_of(rows):
            _spread_rows[(rows.shape[0],)](
                rows_grad, weights_grad, grad.contiguous(), rows.contiguous(), order, weights.contiguous(),
                rows.shape[1], K=weights.shape[1], DOUBLE=_double(rows, weights),
                COLUMNS=min(triton.next_power_of_2(rows.shape[1]), _WIDEST),
            )  # fmt: skip
    return rows_grad, weights_grad


def _double(rows: Tensor, weights: Tensor | None) -> bool:
    return torch.float64 in (rows.dtype, None if weights is None else weights.dtype)


def clear_rows(out: Tensor, ends: Tensor) -> Tensor:
    """Zeroes the rows of ``out`` [N, O], contiguous, that come after the last of ``ends`` [E]."""
    if out.numel():
        columns = min(triton.next_power_of_2(out.shape[1]), _WIDEST)
        with torch.cuda.device_of(out):
            _clear_rows[(min(_PROGRAMS, out.shape[0]),)](out, ends[-1:], *out.shape, COLUMNS=columns)
    return out


def clear_experts(out: Tensor, ends: Tensor) -> Tensor:
    """Zeroes the matrices of ``out`` [E, I, O], contiguous, of experts without rows by ``ends`` [E]."""
    if out.numel():
        with torch.cuda.device_of(out):
            _clear_experts[(out.shape[0], max(_PROGRAMS // out.shape[0], 1))](out, ends, out[0].numel(), BLOCK=_BLOCK)
    return out

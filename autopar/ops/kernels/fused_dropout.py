"""`autopar::dropout` as one kernel: x is read once, the result written once, and the mask is never stored.

The arithmetic is that of `autopar.ops.dropout`, bit by bit. A program computes a tile of rows and columns: the words of
its rows and of its columns once, then one mix per element. Importing this file needs Triton, which comes with torch's
builds for CUDA; with TRITON_INTERPRET=1 the kernel runs on the CPU.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements of a program
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_WIDEST = 1024  # columns of a program
_MOST_ROWS, _MOST_COLUMNS = 1 << 30, 65535 * _WIDEST  # of a launch


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit(do_not_specialize=["salt", "least", "scale"])  # one program for all sites and rates
def _dropout(  # type: ignore[no-untyped-def]
    out, x, seed, at0, at1, at2, at3, rows, columns, size1, size2, whole1, whole2, stride0, stride1, stride2, stride3,
    salt, least, scale,
    FAR: tl.constexpr, MASK: tl.constexpr, DOUBLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    dim0, dim1, dim2 = row // size2 // size1, row // size2 % size1, row % size2
    global0, global1, global2, global3 = dim0.to(tl.int64), dim1.to(tl.int64), dim2.to(tl.int64), column.to(tl.int64)
    if at0 is not None:
        global0 = tl.load(at0 + dim0, mask=row < rows, other=0)
    if at1 is not None:
        global1 = tl.load(at1 + dim1, mask=row < rows, other=0)
    if at2 is not None:
        global2 = tl.load(at2 + dim2, mask=row < rows, other=0)
    if at3 is not None:
        global3 = tl.load(at3 + column, mask=column < columns, other=0)
    global_row = (global0 * whole1 + global1) * whole2 + global2

    number = tl.load(seed)
    key = _mix(number.to(tl.uint32) + 0x3C6EF372)
    key = _mix(key ^ (number >> 32).to(tl.uint32))
    first = _mix(key + salt.to(tl.uint32))
    second = _mix(first + 0x1B873593)
    third = _mix(second + 0x2545F491)

    of_row = _mix(_mix(global_row.to(tl.uint32) ^ first) + second)
    if FAR:
        of_row = _mix(of_row ^ (global_row >> 32).to(tl.uint32))
    of_column = _mix(global3.to(tl.uint32) ^ third)
    hashed = _mix(of_row[:, None] + of_column[None, :])
    keep = (hashed >> 8).to(tl.int32) >= least

    inside = (row < rows)[:, None] & (column < columns)[None, :]
    into = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    if MASK:
        tl.store(into, keep, mask=inside)
    else:
        start = dim0.to(tl.int64) * stride0 + dim1.to(tl.int64) * stride1 + dim2.to(tl.int64) * stride2
        value = tl.load(x + start[:, None] + (column.to(tl.int64) * stride3)[None, :], mask=inside, other=0.0)
        factor = scale.to(tl.float64, bitcast=True)
        if not DOUBLE:
            value, factor = value.to(tl.float32), factor.to(tl.float32)
        value = value * keep.to(value.dtype) * factor  # not `where`: NaN stays NaN
        tl.store(into, value.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class _View:
    """The kernel's arguments for a tensor: sizes, strides, indices (or None) and global sizes of four dims."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    index: tuple[Tensor | None, ...]
    whole: tuple[int, ...]


def takes(shape: Sequence[int], dtype: torch.dtype = torch.bool) -> bool:
    """Whether the kernel supports a result of this shape and dtype (bool: the mask alone)."""
    columns = shape[-1] if shape else 1
    return dtype in (*FLOATS, torch.bool) and math.prod(shape[:-1]) < _MOST_ROWS and columns <= _MOST_COLUMNS


def dropped(x: Tensor, seed: Tensor, p: float, site: int, index: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """`autopar::dropout` for p < 1: a contiguous tensor like x. ``seed`` lies on its device."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if len(x.shape) > 4:
        x = x.contiguous()
    _launch(out, x, seed, p, site, index, shape)
    return out


def mask(
    local_shape: Sequence[int], seed: Tensor, p: float, site: int, index: Sequence[Tensor], shape: Sequence[int]
) -> Tensor:
    """`autopar.ops.dropout.keep_mask`, on the device of the seed."""
    out = torch.empty(tuple(local_shape), dtype=torch.bool, device=seed.device)
    _launch(out, None, seed, p, site, index, shape)
    return out


def _launch(
    out: Tensor, x: Tensor | None, seed: Tensor, p: float, site: int, index: Sequence[Tensor], shape: Sequence[int]
) -> None:
    if not out.numel():
        return
    whole = tuple(shape) or tuple(out.shape)
    view = _four_dims(out if x is None else x, index, whole)
    rows, columns = math.prod(view.sizes[:-1]), view.sizes[-1]
    wide = min(triton.next_power_of_2(columns), _WIDEST)
    high = min(triton.next_power_of_2(rows), TILE // wide)
    (scale,) = struct.unpack("q", struct.pack("d", 1.0 / (1.0 - p) if p < 1 else 0.0))  # Triton's floats have 32 bits
    with torch.cuda.device_of(out):
        _dropout[(triton.cdiv(rows, high), triton.cdiv(columns, wide))](
            out, x, seed.reshape(()).to(torch.int64), *view.index, rows, columns, *view.sizes[1:3], *view.whole[1:3],
            *view.strides, site * 0x9E3779B9 & 0x7FFFFFFF, round(p * (1 << 24)), scale,
            FAR=math.prod(whole[:-1]) > 1 << 32, MASK=x is None, DOUBLE=out.dtype == torch.float64, ROWS=high,
            COLUMNS=wide,
        )  # fmt: skip


def _four_dims(x: Tensor, index: Sequence[Tensor], whole: tuple[int, ...]) -> _View:
    """Contiguous unsharded tensors are rows and columns. Other tensors keep their dims; of more than four, the first
    ones are joined, for which they must be contiguous."""
    sizes = tuple(x.shape)
    if not index and whole == sizes and x.is_contiguous():
        rows, columns = math.prod(sizes[:-1]), sizes[-1] if sizes else 1
        return _View((1, 1, rows, columns), (0, 0, columns, 1), (None,) * 4, (1, 1, rows, columns))
    known = [i.to(x.device, torch.int64) for i in index] or [torch.arange(n, device=x.device) for n in sizes]
    strides = x.stride()
    while len(sizes) > 4:
        assert x.is_contiguous()
        known[:2] = [(known[0].unsqueeze(-1) * whole[1] + known[1]).flatten()]
        sizes, strides = (sizes[0] * sizes[1], *sizes[2:]), strides[1:]
        whole = (whole[0] * whole[1], *whole[2:])
    more = 4 - len(sizes)
    return _View(
        (1,) * more + sizes,
        (0,) * more + strides,
        (None,) * more + tuple(i.contiguous() for i in known),
        (1,) * more + whole,
    )

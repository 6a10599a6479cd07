"""Sizes that do not divide: pieces of equal shape, those of the last ranks padded with zeros.

    63 words on 2 ranks: units=63      32 | 31 + 1 of padding
    14 heads of 16 on 4: units=14      64 | 64 | 64 | 32 + 32 of padding

A dim, or each of its blocks, consists of ``units`` equal parts which stay whole. A rank holds n of them, rounded up. So
a padded dim is one that was extended at the end until it divides, then cut evenly: everything about even shards holds
for it, and only whole values are padded or cropped (docs/design/padding.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def rows_per_rank(block: int, units: int, ranks: int) -> int:
    """Rows of a block on a rank, padding included."""
    return abs(block) // units * -(-units // ranks) if units else abs(block) // ranks


def padded_size(size: int, units: int, ranks: int) -> int:
    """The size of a dim, or of a block, whose shards are padded."""
    return rows_per_rank(size, units, ranks) * ranks if units else size


def shares_text(units: int, ranks: int) -> str:
    """'14 units over 4 ranks, padded: 4, 4, 4, 2'."""
    most = -(-units // ranks)
    held = [min(most, max(units - most * rank, 0)) for rank in range(ranks)]
    runs = [(n, len(list(group))) for n, group in itertools.groupby(held)]
    shown = ", ".join(str(n) if count == 1 else f"{n} on {count} ranks" for n, count in runs)
    return f"{units} units over {ranks} ranks, padded: {shown}"


def pad_blocks(x: Tensor, dim: int, blocks: Sequence[int], units: int, ranks: int) -> Tensor:
    """A whole value with zeros at the end of each block, so that the block divides over the ranks. Only the ratios of
    ``blocks`` count."""
    if not units or not units % ranks:
        return x
    parts = x.split(_sizes(blocks, x.shape[dim]), dim)
    padded = [_extended(part, dim, padded_size(part.shape[dim], units, ranks)) for part in parts]
    return torch.cat(padded, dim) if len(padded) > 1 else padded[0]


def _extended(x: Tensor, dim: int, size: int) -> Tensor:
    return torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [0, size - x.shape[dim]])


def crop_blocks(x: Tensor, dim: int, blocks: Sequence[int], units: int, ranks: int) -> Tensor:
    """The inverse of `pad_blocks`: a copy, since gradients are alone in their storage."""
    if not units or not units % ranks:
        return x
    parts = x.split(_sizes(blocks, x.shape[dim]), dim)
    return torch.cat([part.narrow(dim, 0, cropped_size(part.shape[dim], units, ranks)) for part in parts], dim)


def cropped_size(size: int, units: int, ranks: int) -> int:
    """The size of a dim without its padding: the inverse of `padded_size`."""
    return size // (-(-units // ranks) * ranks) * units if units else size


def _sizes(blocks: Sequence[int], size: int) -> list[int]:
    whole = sum(map(abs, blocks))
    return [abs(b) * size // whole for b in blocks] or [size]


def real_rows(blocks: Sequence[int], axis: str, size: int, units: int, whole: int, device: torch.device) -> Tensor:
    """[rows of this rank's piece] bool: which are not padding, of a dim of size ``whole``."""
    ones = torch.ones(whole, dtype=torch.int32, device=device)
    mine: Tensor = torch.ops.autopar.shard_slice(ones, 0, list(blocks), axis, size, units)
    return mine != 0


def zero_padding(
    x: Tensor, axis: str, size: int, dim: int, blocks: list[int], units: int, forward: bool, fill: float = 0.0
) -> Tensor:
    """A piece with zeros (``fill``) in its padding, if ``forward``, and with zeros in that of its gradient. In the
    graph of a whole value ``size`` is 1, and there is no padding."""
    out: Tensor = _ZeroPadding.apply(x, (axis, size, dim, blocks, units), forward, fill)
    return out


class _ZeroPadding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, where: tuple[Any, ...], forward: bool, fill: float) -> Tensor:
        ctx.where = where
        return _filled(x, where, fill) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _filled(grad, ctx.where, 0.0), None, None, None


def _filled(x: Tensor, where: tuple[Any, ...], fill: float) -> Tensor:
    axis, size, dim, blocks, units = where
    if units % size == 0:
        return x.clone()
    real = real_rows(blocks, axis, size, units, cropped_size(x.shape[dim] * size, units, size), x.device)
    return torch.where(real.view(-1, *[1] * (x.dim() - 1 - dim)), x, torch.full_like(x, fill))

"""Halos: what reads a few tokens beside its own needs only those of the neighbours of a sharded sequence.

    shift(x, 1, by=1):  rank 0: x0 x1 x2   rank 1: x3 x4 x5    -->    rank 0:  0 x0 x1   rank 1: x2 x3 x4

`lower_to_local` turns the operators of `autopar.ops.token_windows` into these. The last (or first) rows of all chunks
are gathered, a rank slices those in front of (or behind) its own chunks, and the operator runs on each chunk and its
halo. Gradients of a halo take the transpose: they are summed into the rows that it was copied from. ``blocks`` is that
of the tokens' Shard, so a rank of a zigzag has two chunks, each with a halo of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.conversions import exchange
from autopar.ir.placement import REPLICATE, Shard
from autopar.ops.token_windows import shift


def shift_of_piece(
    x: Tensor, dim: int, by: int, circular: bool, axis: str, size: int, blocks: list[int]
) -> Tensor:  # fmt: skip
    """`shift` on the tokens of a rank."""
    shard = Shard(dim, tuple(blocks))
    wide = with_halos(x, shard, max(by, 0), max(-by, 0), axis, size, circular)
    length = x.shape[dim] // len(wide)
    return torch.cat([chunk.narrow(dim, 0 if by > 0 else -by, length) for chunk in wide], dim)


def token_conv1d_of_piece(
    input: Tensor, weight: Tensor, bias: Tensor | None, before: int, behind: int, dilation: int, groups: int, axis: str,
    size: int, blocks: list[int],
) -> Tensor:  # fmt: skip
    """`token_conv1d` on the tokens of a rank."""
    wide = with_halos(input, Shard(2, tuple(blocks)), before, behind, axis, size)
    return torch.cat([F.conv1d(chunk, weight, bias, dilation=dilation, groups=groups) for chunk in wide], 2)


def with_halos(
    x: Tensor, shard: Shard, before: int, behind: int, axis: str, size: int, circular: bool = False
) -> list[Tensor]:
    """Each chunk of a rank, between the ``before`` rows in front of it and the ``behind`` rows that follow; beyond the
    ends of the sequence rows are zero, or those of the other end."""
    chunks = x.chunk(max(1, len(shard.blocks)), shard.dim)
    front = _halos(chunks, shard, before, axis, size, circular)
    back = _halos(chunks, shard, -behind, axis, size, circular)
    return [
        torch.cat([part for part in parts if part is not None], shard.dim)
        for parts in zip(front, chunks, back, strict=True)
    ]


def _halos(
    chunks: tuple[Tensor, ...], shard: Shard, rows: int, axis: str, size: int, circular: bool
) -> list[Tensor | None]:
    """For each chunk the ``rows`` rows in front of it; the -``rows`` behind it, if negative. More rows than a chunk has
    come from as many chunks as it takes."""
    if not rows:
        return [None] * len(chunks)
    dim, length = shard.dim, chunks[0].shape[shard.dim]
    count = min(abs(rows), length)
    ends = [chunk.narrow(dim, length - count if rows > 0 else 0, count) for chunk in chunks]
    piece = of_chunks(shard, count, size)
    whole = exchange(torch.cat(ends, dim), axis, size, str(piece), str(REPLICATE))
    hops = range(-(-abs(rows) // count), 0, -1) if rows > 0 else range(1, -(rows // count) + 1)
    found: list[list[Tensor]] = [[] for _ in chunks]
    for hop in hops:
        moved = shift(whole, dim, hop * count if rows > 0 else -hop * count, circular)
        own = exchange(moved, axis, size, str(REPLICATE), str(piece))
        for parts, part in zip(found, own.chunk(len(chunks), dim), strict=True):
            parts.append(part)
    joined = [torch.cat(parts, dim) for parts in found]
    return [x.narrow(dim, x.shape[dim] - rows if rows > 0 else 0, abs(rows)) for x in joined]


def of_chunks(shard: Shard, rows: int, size: int) -> Shard:
    """The Shard of a value with ``rows`` rows for each chunk of another, which is sharded as ``shard``."""
    blocks = tuple(rows * size if b > 0 else -rows * size for b in shard.blocks)
    return Shard(shard.dim, blocks)

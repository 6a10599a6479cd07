"""Between a whole tensor and the buffer that a collective moves: one row per rank, each row one rank's piece.

    whole [.., D, ..]  --to_rows-->  rows [n, .., D/n, ..]  --from_rows-->  whole

The pieces are those of `autopar.placement.Shard`. Each direction copies at most once, and not at all where the dim is
the first one (or only dims of size 1 come before it) and has one block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.placement import scaled_blocks


def to_rows(x: Tensor, dim: int, blocks: Sequence[int], ranks: int) -> Tensor:
    """[.., D, ..] -> contiguous [ranks, .., D/ranks, ..]."""
    blocks = scaled_blocks(blocks, x.shape[dim]) or (x.shape[dim],)
    if len(set(blocks)) == 1:
        # [.., k*n*b, ..] -> [.., k, n, b, ..] -> [n, .., k, b, ..]
        split = x.unflatten(dim, (len(blocks), ranks, blocks[0] // ranks))
        return split.movedim(dim + 1, 0).flatten(dim + 1, dim + 2).contiguous()
    shape = list(x.shape)
    shape[dim] //= ranks
    rows, start = x.new_empty([ranks, *shape]), 0
    for block, part in zip(blocks, x.split(list(blocks), dim)):
        rows.narrow(dim + 1, start, block // ranks).copy_(part.unflatten(dim, (ranks, block // ranks)).movedim(dim, 0))
        start += block // ranks
    return rows


def from_rows(rows: Tensor, dim: int, blocks: Sequence[int]) -> Tensor:
    """[ranks, .., D/ranks, ..] -> contiguous [.., D, ..]; the inverse of `to_rows`."""
    ranks, size = rows.shape[0], rows.shape[dim + 1] * rows.shape[0]
    blocks = scaled_blocks(blocks, size) or (size,)
    if len(set(blocks)) == 1:
        # [n, .., k*b, ..] -> [n, .., k, b, ..] -> [.., k, n, b, ..]
        split = rows.unflatten(dim + 1, (len(blocks), blocks[0] // ranks))
        return split.movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()
    shape = list(rows.shape[1:])
    shape[dim] = size
    whole = rows.new_empty(shape)
    pieces = rows.split([b // ranks for b in blocks], dim + 1)
    for block, part, target in zip(blocks, pieces, whole.split(list(blocks), dim)):
        target.unflatten(dim, (ranks, block // ranks)).movedim(dim, 0).copy_(part)
    return whole


def rows_of(size: int, blocks: Sequence[int], ranks: int) -> Tensor:
    """[ranks, size/ranks] int64: the global positions along a dim that each rank holds."""
    return to_rows(torch.arange(size), 0, blocks, ranks)

"""Between a whole tensor and the buffer that a collective moves: one row per rank, each row one rank's piece.

    whole [.., D, ..]  --to_rows-->  rows [n, .., D/n, ..]  --from_rows-->  whole

The pieces are those of `autopar.ir.placement.Shard`. Each direction copies at most once (a block dealt backwards
twice), and not at all where the dim is the first one (or only dims of size 1 come before it) and has one block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.ir.placement import repetitions, scaled_blocks


def to_rows(x: Tensor, dim: int, blocks: Sequence[int], ranks: int) -> Tensor:
    """[.., D, ..] -> contiguous [ranks, .., D/ranks, ..]."""
    size = x.shape[dim]
    times, pattern = _pattern(blocks, size)
    # patterns are taken apart: [.., k*n*b, ..] -> [.., k, n*b, ..] -> [n, .., k, b, ..] -> [n, .., k*b, ..]
    apart = x.unflatten(dim, (times, size // times))
    if len(pattern) == 1:
        return _dealt(apart, dim + 1, pattern[0], ranks).flatten(dim + 1, dim + 2).contiguous()
    shape = list(apart.shape)
    shape[dim + 1] //= ranks
    rows, start = x.new_empty([ranks, *shape]), 0
    for block, part in zip(pattern, apart.split([abs(b) for b in pattern], dim + 1)):
        length = abs(block) // ranks
        rows.narrow(dim + 2, start, length).copy_(_dealt(part, dim + 1, block, ranks))
        start += length
    return rows.flatten(dim + 1, dim + 2)


def from_rows(rows: Tensor, dim: int, blocks: Sequence[int]) -> Tensor:
    """[ranks, .., D/ranks, ..] -> contiguous [.., D, ..]; the inverse of `to_rows`."""
    ranks, size = rows.shape[0], rows.shape[dim + 1] * rows.shape[0]
    times, pattern = _pattern(blocks, size)
    apart = rows.unflatten(dim + 1, (times, size // ranks // times))
    if len(pattern) == 1:
        # [n, .., k, b, ..] -> [.., k, n, b, ..] -> [.., k*n*b, ..]
        return _in_order(apart, pattern[0]).movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()
    shape = list(apart.shape[1:])
    shape[dim + 1] = size // times
    whole = rows.new_empty(shape)
    parts = apart.split([abs(b) // ranks for b in pattern], dim + 2)
    for block, part, target in zip(pattern, parts, whole.split([abs(b) for b in pattern], dim + 1)):
        target.unflatten(dim + 1, (ranks, abs(block) // ranks)).movedim(dim + 1, 0).copy_(_in_order(part, block))
    return whole.flatten(dim, dim + 1)


def rows_of(size: int, blocks: Sequence[int], ranks: int) -> Tensor:
    """[ranks, size/ranks] int64: the global positions along a dim that each rank holds."""
    return to_rows(torch.arange(size), 0, blocks, ranks)


def _pattern(blocks: Sequence[int], size: int) -> tuple[int, tuple[int, ...]]:
    """(how often, the shortest pattern) of blocks scaled to a dim of ``size``."""
    whole = scaled_blocks(blocks, size) or (size,)
    times = repetitions(whole)
    return times, whole[: len(whole) // times]


def _dealt(x: Tensor, dim: int, block: int, ranks: int) -> Tensor:
    """[.., b, ..] -> [ranks, .., b/ranks, ..], a view unless the block is dealt backwards."""
    return _in_order(x.unflatten(dim, (ranks, abs(block) // ranks)).movedim(dim, 0), block)


def _in_order(pieces: Tensor, block: int) -> Tensor:
    """Between the order of the pieces (dim 0) in a block and that of the ranks which hold them, both ways."""
    return pieces if block > 0 else pieces.flip(0)

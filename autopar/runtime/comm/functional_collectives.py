"""The raw collectives in terms of functional ones and plain operators: what a compiler is given.

The same layouts, starts and waits as in `autopar.runtime.comm.collectives`, without in-place writes. Each takes the
functional collectives, its tensor, and its other arguments by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import autopar.ops.collectives  # noqa: F401 - defines the operators
from autopar.ir.placement import Shard, piece, place_in_block, scaled_blocks
from autopar.ops.padded_pieces import crop_blocks, pad_blocks
from autopar.runtime.comm.collectives import as_bytes, in_order, to_rows

if TYPE_CHECKING:
    from autopar.adapters.inductor import Functional  # slow to import

Traced = tuple[Tensor, Callable[[Tensor], Tensor]]  # what is on its way, and what makes the result of it


def from_stack(rows: Tensor, dim: int, blocks: list[int]) -> Tensor:
    """`from_rows` without in-place writes."""
    ranks, size = rows.shape[0], rows.shape[dim + 1]
    sizes = scaled_blocks(blocks, size * ranks) or (size * ranks,)
    parts = zip(sizes, rows.split([abs(b) // ranks for b in sizes], dim + 1))
    return torch.cat([in_order(p, b).movedim(0, dim).flatten(dim, dim + 1) for b, p in parts], dim)


def _joined(rows: Tensor, dim: int, blocks: list[int], units: int) -> Tensor:
    return crop_blocks(from_stack(rows, dim, blocks), dim, blocks, units, rows.shape[0]).contiguous()


def all_reduce(c: Functional, x: Tensor, axis: str, op: str) -> Traced:
    """The sum (or maximum) over the axis, on every rank."""
    return c.all_reduce(x.contiguous(), axis, op), lambda made: made


def all_gather(c: Functional, x: Tensor, dim: int, blocks: list[int], axis: str, size: int, units: int = 0) -> Traced:
    """Every rank's piece joined along ``dim``, on every rank."""
    rows = c.all_gather(as_bytes(x.contiguous()).unsqueeze(0), axis)
    return rows, lambda rows: _joined(rows, dim, blocks, units).view(x.dtype)


def reduce_scatter(
    c: Functional, x: Tensor, dim: int, blocks: list[int], axis: str, size: int, units: int = 0
) -> Traced:
    """The sum over the axis, each rank keeping its piece along ``dim``."""
    x = pad_blocks(x, dim, blocks, units, size)
    return c.reduce_scatter(to_rows(x, dim, blocks, size), axis), lambda mine: mine.squeeze(0)


def all_to_all(
    c: Functional,
    x: Tensor,
    src_dim: int,
    src_blocks: list[int],
    dst_dim: int,
    dst_blocks: list[int],
    axis: str,
    size: int,
    src_units: int = 0,
    dst_units: int = 0,
) -> Traced:
    """From pieces along one dim to pieces along another."""
    if src_dim == dst_dim:
        sent, whole = all_gather(c, x, src_dim, src_blocks, axis, size, src_units)
        return sent, lambda rows: shard_slice(c, whole(rows), dst_dim, dst_blocks, axis, size, dst_units)
    x = pad_blocks(x, dst_dim, dst_blocks, dst_units, size)
    rows = c.all_to_all(to_rows(x, dst_dim, dst_blocks, size), [1] * size, [1] * size, axis)
    return rows, lambda rows: _joined(rows, src_dim, src_blocks, src_units)


def shard_slice(c: Functional, x: Tensor, dim: int, blocks: list[int], axis: str, size: int, units: int = 0) -> Tensor:
    """This rank's piece of a whole value."""
    mine = piece(x, Shard(dim, scaled_blocks(blocks, x.shape[dim]), units=units), size, c.groups.index(axis))
    return torch.cat([mine], dim)  # no view of the whole


def shard_pad(c: Functional, x: Tensor, dim: int, blocks: list[int], axis: str, size: int, units: int = 0) -> Tensor:
    """This rank's piece in its place in zeros."""
    me = c.groups.index(axis)
    padded = []
    sizes = scaled_blocks(blocks, x.shape[dim] * size) or (x.shape[dim] * size,)
    for block, part in zip(sizes, x.split([abs(b) // size for b in sizes], dim)):
        zero = torch.zeros_like(part)
        padded += [part if place == place_in_block(block, size, me) else zero for place in range(size)]
    return crop_blocks(torch.cat(padded, dim), dim, blocks, units, size).contiguous()

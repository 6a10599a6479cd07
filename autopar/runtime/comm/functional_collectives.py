"""The raw collectives in terms of functional ones and plain operators: what a compiler is given.

The same layouts, starts and waits as in `autopar.runtime.comm.collectives`, without in-place writes.

    pending = start(x)              all_gather(x), on its way
    y = finish_with(c)(pending)     wait_tensor, then the layout
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import autopar.ops.collectives  # noqa: F401 - defines the operators
from autopar.ir.placement import Shard, piece, place_in_block, scaled_blocks


class Collectives(Protocol):
    """Functional collectives over an axis, whose results are there after ``wait``; dim 0 of a tensor is split over, or
    collected from, the ranks in order."""

    groups: Any

    def all_reduce(self, x: Tensor, axis: str, op: str) -> Tensor: ...
    def all_gather(self, x: Tensor, axis: str) -> Tensor: ...
    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor: ...
    def all_to_all(self, x: Tensor, received: list[int], sent: list[int], axis: str) -> Tensor: ...
    def wait(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class TracedCollective:
    """A collective on its way, while it is traced: ``done(value)`` is the result once ``value`` is there."""

    value: Tensor
    done: Callable[[Tensor], Tensor] = lambda x: x


def finish_with(c: Collectives) -> Callable[[TracedCollective], Tensor]:
    """What waits for a collective."""

    def finish_traced(pending: TracedCollective) -> Tensor:
        return pending.done(c.wait(pending.value))

    return finish_traced


def to_stack(x: Tensor, dim: int, blocks: list[int], ranks: int) -> Tensor:
    """[.., D, ..] -> [ranks, .., D/ranks, ..], functional twin of `layout.to_rows`."""
    sizes = scaled_blocks(blocks, x.shape[dim]) or (x.shape[dim],)
    parts = x.split([abs(b) for b in sizes], dim)
    dealt = (p.unflatten(dim, (ranks, p.shape[dim] // ranks)).movedim(dim, 0) for p in parts)
    return torch.cat([_in_order(p, b) for b, p in zip(sizes, dealt)], dim + 1)


def from_stack(rows: Tensor, dim: int, blocks: list[int]) -> Tensor:
    """Inverse of `to_stack`."""
    ranks, size = rows.shape[0], rows.shape[dim + 1]
    sizes = scaled_blocks(blocks, size * ranks) or (size * ranks,)
    parts = zip(sizes, rows.split([abs(b) // ranks for b in sizes], dim + 1))
    return torch.cat([_in_order(p, b).movedim(0, dim).flatten(dim, dim + 1) for b, p in parts], dim)


def _in_order(rows: Tensor, block: int) -> Tensor:
    """A block's pieces by rank <-> by place."""
    return rows if block > 0 else rows.flip(0)


def functional_all_reduce(c: Collectives, x: Tensor, axis: str, op: str) -> TracedCollective:
    """The sum (or maximum) over the axis, on every rank."""
    return TracedCollective(c.all_reduce(x.contiguous(), axis, op))


def functional_all_gather(
    c: Collectives, x: Tensor, dim: int, blocks: list[int], axis: str, size: int
) -> TracedCollective:
    """Every rank's piece joined along ``dim``, on every rank."""
    gathered = c.all_gather(x.contiguous().unsqueeze(0), axis)
    return TracedCollective(gathered, lambda rows: from_stack(rows, dim, blocks).contiguous())


def functional_reduce_scatter(
    c: Collectives, x: Tensor, dim: int, blocks: list[int], axis: str, size: int
) -> TracedCollective:
    """The sum over the axis, each rank keeping its piece along ``dim``."""
    rows = to_stack(x, dim, blocks, size).contiguous()
    return TracedCollective(c.reduce_scatter(rows, axis), lambda mine: mine.squeeze(0))


def functional_all_to_all(
    c: Collectives,
    x: Tensor,
    src_dim: int,
    src_blocks: list[int],
    dst_dim: int,
    dst_blocks: list[int],
    axis: str,
    size: int,
) -> TracedCollective:
    """From pieces along one dim to pieces along another."""
    if src_dim == dst_dim:
        whole = functional_all_gather(c, x, src_dim, src_blocks, axis, size)
        return TracedCollective(
            whole.value, lambda rows: functional_shard_slice(c, whole.done(rows), dst_dim, dst_blocks, axis, size)
        )
    rows = to_stack(x, dst_dim, dst_blocks, size).contiguous()
    return TracedCollective(
        c.all_to_all(rows, [1] * size, [1] * size, axis),
        lambda rows: from_stack(rows, src_dim, src_blocks).contiguous(),
    )


def functional_shard_slice(c: Collectives, x: Tensor, dim: int, blocks: list[int], axis: str, size: int) -> Tensor:
    """This rank's piece of a whole value."""
    mine = piece(x, Shard(dim, scaled_blocks(blocks, x.shape[dim])), size, c.groups.index(axis))
    return torch.cat([mine], dim)  # no view of the whole


def functional_shard_pad(c: Collectives, x: Tensor, dim: int, blocks: list[int], axis: str, size: int) -> Tensor:
    """This rank's piece in its place in zeros."""
    me = c.groups.index(axis)
    padded = []
    sizes = scaled_blocks(blocks, x.shape[dim] * size) or (x.shape[dim] * size,)
    for block, part in zip(sizes, x.split([abs(b) // size for b in sizes], dim)):
        zero = torch.zeros_like(part)
        padded += [part if place == place_in_block(block, size, me) else zero for place in range(size)]
    return torch.cat(padded, dim)


_RAW = torch.ops.autopar
FUNCTIONAL: dict[Any, Callable[..., Any]] = {
    _RAW.all_reduce.default: functional_all_reduce,
    _RAW.all_gather.default: functional_all_gather,
    _RAW.reduce_scatter.default: functional_reduce_scatter,
    _RAW.all_to_all.default: functional_all_to_all,
    _RAW.shard_slice.default: functional_shard_slice,
    _RAW.shard_pad.default: functional_shard_pad,
}


def functional_call(c: Collectives, target: Any, given: Mapping[str, Any]) -> Callable[[Tensor], Any]:
    """What a node of a raw collective calls with its tensor; ``given``: its other arguments by name."""
    function = FUNCTIONAL[target]

    def call(x: Tensor) -> Any:
        return function(c, x, **given)

    call.__name__ = call.__qualname__ = function.__name__
    return call

"""The raw collectives in terms of functional ones and plain operators: what a compiler is given.

The same layouts, starts and waits as in `autopar.runtime.comm.collectives`, without in-place writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import autopar.ops.collectives  # noqa: F401 - defines the operators
from autopar.ir.placement import Shard, piece, place_in_block, scaled_blocks
from autopar.runtime.comm.collectives import in_order, to_rows

if TYPE_CHECKING:
    from autopar.adapters.inductor import Functional  # slow to import


@dataclass(frozen=True)
class TracedCollective:
    """A collective on its way, while it is traced: ``done(value)`` is the result once ``value`` is there."""

    value: Tensor
    done: Callable[[Tensor], Tensor] = lambda x: x


def finish_with(c: Functional) -> Callable[[TracedCollective], Tensor]:
    """What waits for a collective."""

    def finish_traced(pending: TracedCollective) -> Tensor:
        return pending.done(c.wait(pending.value))

    return finish_traced


def from_stack(rows: Tensor, dim: int, blocks: list[int]) -> Tensor:
    """`from_rows` without in-place writes."""
    ranks, size = rows.shape[0], rows.shape[dim + 1]
    sizes = scaled_blocks(blocks, size * ranks) or (size * ranks,)
    parts = zip(sizes, rows.split([abs(b) // ranks for b in sizes], dim + 1))
    return torch.cat([in_order(p, b).movedim(0, dim).flatten(dim, dim + 1) for b, p in parts], dim)


def functional_all_reduce(c: Functional, x: Tensor, axis: str, op: str) -> TracedCollective:
    """The sum (or maximum) over the axis, on every rank."""
    return TracedCollective(c.all_reduce(x.contiguous(), axis, op))


def functional_all_gather(
    c: Functional, x: Tensor, dim: int, blocks: list[int], axis: str, size: int
) -> TracedCollective:
    """Every rank's piece joined along ``dim``, on every rank."""
    gathered = c.all_gather(x.contiguous().unsqueeze(0), axis)
    return TracedCollective(gathered, lambda rows: from_stack(rows, dim, blocks).contiguous())


def functional_reduce_scatter(
    c: Functional, x: Tensor, dim: int, blocks: list[int], axis: str, size: int
) -> TracedCollective:
    """The sum over the axis, each rank keeping its piece along ``dim``."""
    rows = to_rows(x, dim, blocks, size)
    return TracedCollective(c.reduce_scatter(rows, axis), lambda mine: mine.squeeze(0))


def functional_all_to_all(
    c: Functional,
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
    rows = to_rows(x, dst_dim, dst_blocks, size)
    return TracedCollective(
        c.all_to_all(rows, [1] * size, [1] * size, axis),
        lambda rows: from_stack(rows, src_dim, src_blocks).contiguous(),
    )


def functional_shard_slice(c: Functional, x: Tensor, dim: int, blocks: list[int], axis: str, size: int) -> Tensor:
    """This rank's piece of a whole value."""
    mine = piece(x, Shard(dim, scaled_blocks(blocks, x.shape[dim])), size, c.groups.index(axis))
    return torch.cat([mine], dim)  # no view of the whole


def functional_shard_pad(c: Functional, x: Tensor, dim: int, blocks: list[int], axis: str, size: int) -> Tensor:
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


def functional_call(c: Functional, target: Any, given: Mapping[str, Any]) -> Callable[[Tensor], Any]:
    """What a node of a raw collective calls with its tensor; ``given``: its other arguments by name."""
    function = FUNCTIONAL[target]

    def call(x: Tensor) -> Any:
        return function(c, x, **given)

    call.__name__ = call.__qualname__ = function.__name__
    return call

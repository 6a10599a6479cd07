"""Collectives over an axis of the mesh: started asynchronously, waited for later, failures explained, bytes counted.

    pending = start(x)      # a `Collective` made for one node of a graph
    y = finish(pending)     # right before the first use

A collective moves a buffer with one row per rank, each row one rank's piece (`autopar.ir.placement.Shard`):

    whole [.., D, ..]  --to_rows-->  rows [n, .., D/n, ..]  --from_rows-->  whole

Each direction copies at most once (a block dealt backwards twice), and not at all where the dim is the first one (or
only dims of size 1 come before it) and has one block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.adapters.distributed import all_gather_single, reduce_scatter_single
from autopar.ir.placement import Shard, piece, place_in_block, repetitions, scaled_blocks
from autopar.ops.padded_pieces import crop_blocks, pad_blocks
from autopar.runtime.comm.step_notes import open_notes
from autopar.runtime.comm.wait_times import waiting
from autopar.runtime.fault.aborts import started
from autopar.runtime.fault.errors import explained
from autopar.runtime.mesh.process_groups import Groups

# --- rows ------------------------------------------------------------------------------------------------------


def to_rows(x: Tensor, dim: int, blocks: Sequence[int], ranks: int) -> Tensor:
    """[.., D, ..] -> contiguous [ranks, .., D/ranks, ..]."""
    size = x.shape[dim]
    times, pattern = _pattern(blocks, size)
    # patterns are taken apart: [.., k*n*b, ..] -> [.., k, n*b, ..] -> [n, .., k, b, ..] -> [n, .., k*b, ..]
    apart = x.unflatten(dim, (times, size // times))
    if len(pattern) == 1:
        return _dealt(apart, dim + 1, pattern[0], ranks).flatten(dim + 1, dim + 2).contiguous()
    parts = zip(pattern, apart.split([abs(b) for b in pattern], dim + 1))
    rows = torch.cat([_dealt(part, dim + 1, block, ranks) for block, part in parts], dim + 2)
    return rows.contiguous().flatten(dim + 1, dim + 2)


def from_rows(rows: Tensor, dim: int, blocks: Sequence[int]) -> Tensor:
    """[ranks, .., D/ranks, ..] -> contiguous [.., D, ..]; the inverse of `to_rows`."""
    ranks, size = rows.shape[0], rows.shape[dim + 1] * rows.shape[0]
    times, pattern = _pattern(blocks, size)
    apart = rows.unflatten(dim + 1, (times, size // ranks // times))
    if len(pattern) == 1:
        # [n, .., k, b, ..] -> [.., k, n, b, ..] -> [.., k*n*b, ..]
        return in_order(apart, pattern[0]).movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()
    shape = list(apart.shape[1:])
    shape[dim + 1] = size // times
    whole = rows.new_empty(shape)
    parts = apart.split([abs(b) // ranks for b in pattern], dim + 2)
    for block, part, target in zip(pattern, parts, whole.split([abs(b) for b in pattern], dim + 1)):
        target.unflatten(dim + 1, (ranks, abs(block) // ranks)).movedim(dim + 1, 0).copy_(in_order(part, block))
    return whole.flatten(dim, dim + 1)


def joined(rows: Tensor, dim: int, blocks: Sequence[int], units: int = 0) -> Tensor:
    """`from_rows`, without the padding of pieces."""
    return crop_blocks(from_rows(rows, dim, blocks), dim, blocks, units, rows.shape[0]).contiguous()


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
    return in_order(x.unflatten(dim, (ranks, abs(block) // ranks)).movedim(dim, 0), block)


def in_order(pieces: Tensor, block: int) -> Tensor:
    """Between the order of the pieces (dim 0) in a block and that of the ranks which hold them, both ways."""
    return pieces if block > 0 else pieces.flip(0)


# --- collectives -----------------------------------------------------------------------------------------------


@dataclass
class PendingCollective:
    """A collective on its way: ``done(buffer)`` is the result once ``work`` has finished."""

    work: dist.Work
    buffer: Tensor
    done: Callable[[Tensor], Tensor] | None
    collective: Collective


@dataclass(frozen=True)
class Collective:
    """One collective of a graph: which axis, which node, for messages."""

    groups: Groups
    kind: str
    axis: str
    node: str

    def __str__(self) -> str:
        return f'{self.kind} over axis "{self.axis}" (node {self.node})'

    @functools.cached_property
    def _told(self) -> tuple[str, Sequence[int]]:
        return str(self), self.groups.ranks(self.axis)

    def explained(self) -> explained:
        """Context manager: errors name it, and the ranks that have failed."""
        return explained(*self._told)

    def launch(
        self,
        call: Callable[..., Any],
        *args: Any,
        buffer: Tensor,
        done: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> PendingCollective:
        started(str, self)
        if (notes := open_notes()) is not None:
            notes.note(f"what {self} is given", args[-1:] if len(args) < 3 else args[1:2])
        with self.explained():
            work = call(*args, **kwargs, group=self.groups.group(self.axis), async_op=True)
        return PendingCollective(work, buffer, done, self)


def finish(pending: PendingCollective) -> Tensor:
    """Wait for a collective. Raises CollectiveError (a RuntimeError) that names the ranks which failed."""
    collective = pending.collective
    with collective.explained(), waiting(collective.axis):
        pending.work.wait()
    if (notes := open_notes()) is not None:
        notes.note(f"the result of {collective}", [pending.buffer], received=True)
    return pending.buffer if pending.done is None else pending.done(pending.buffer)


Start = Callable[..., PendingCollective]

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def all_reduce(groups: Groups, node: str, axis: str, op: str, in_place: bool = False) -> Start:
    """``in_place``: the tensor given is a temporary that may be overwritten."""
    collective, reduction = Collective(groups, "all_reduce", axis, node), _OPS[op]

    def start_all_reduce(x: Tensor) -> PendingCollective:
        keep = in_place and x.is_contiguous()
        out = x if keep else x.clone(memory_format=torch.contiguous_format)
        return collective.launch(dist.all_reduce, out, op=reduction, buffer=out)

    return start_all_reduce


def broadcast(groups: Groups, node: str, axis: str, source: int) -> Start:
    """The tensor of the rank at coordinate ``source``, written into that of the others."""
    collective, rank = Collective(groups, "broadcast", axis, node), groups.ranks(axis)[source]

    def start_broadcast(x: Tensor) -> PendingCollective:
        out = x.contiguous()
        return collective.launch(dist.broadcast, out, src=rank, buffer=out)

    return start_broadcast


def as_bytes(x: Tensor) -> Tensor:
    """Numbers of eight bits as bytes, which every backend moves; others as they are."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 and x.is_floating_point() else x


def all_gather(groups: Groups, node: str, dim: int, blocks: list[int], axis: str, units: int = 0) -> Start:
    """Pieces along ``dim`` -> the whole, without the padding of pieces (``units``)."""
    collective, ranks = Collective(groups, "all_gather", axis, node), groups.size(axis)

    def start_all_gather(x: Tensor) -> PendingCollective:
        dtype, x = x.dtype, as_bytes(x)
        rows = x.new_empty((ranks, *x.shape))
        return collective.launch(
            all_gather_single, _flat(rows), _flat(x), buffer=rows,
            done=lambda r: joined(r, dim, blocks, units).view(dtype),
        )  # fmt: skip

    return start_all_gather


def reduce_scatter(groups: Groups, node: str, dim: int, blocks: list[int], axis: str, units: int = 0) -> Start:
    """Addends of the whole -> this rank's piece of the sum."""
    collective, ranks = Collective(groups, "reduce_scatter", axis, node), groups.size(axis)

    def start_reduce_scatter(x: Tensor) -> PendingCollective:
        rows = to_rows(pad_blocks(x, dim, blocks, units, ranks), dim, blocks, ranks)
        out = x.new_empty(rows.shape[1:])
        return collective.launch(reduce_scatter_single, _flat(out), _flat(rows), buffer=out)

    return start_reduce_scatter


def all_to_all(
    groups: Groups, node: str, src_dim: int, src_blocks: list[int], dst_dim: int, dst_blocks: list[int], axis: str,
    src_units: int = 0, dst_units: int = 0,
) -> Start:  # fmt: skip
    """Pieces along ``src_dim`` -> pieces along ``dst_dim``."""
    if src_dim == dst_dim:
        assert not src_units and not dst_units, "one dim is padded in one way"
        return _regroup(groups, node, src_dim, src_blocks, dst_blocks, axis)
    collective, ranks = Collective(groups, "all_to_all", axis, node), groups.size(axis)

    def start_all_to_all(x: Tensor) -> PendingCollective:
        rows = to_rows(pad_blocks(x, dst_dim, dst_blocks, dst_units, ranks), dst_dim, dst_blocks, ranks)
        out = torch.empty_like(rows)
        return collective.launch(
            dist.all_to_all_single,
            _flat(out),
            _flat(rows),
            buffer=out,
            done=lambda r: joined(r, src_dim, src_blocks, src_units),
        )

    return start_all_to_all


def all_to_all_rows(
    groups: Groups, node: str, back: bool, axis: str, count: Callable[[str, str, int], None], rows: int = 0
) -> Start:  # fmt: skip
    """Rows for each rank -> rows from each; ``splits`` [2, ranks] on the host has their numbers, there and here.
    ``count`` is called with (axis, kind, bytes sent by this rank). ``rows``: of the result, with zeros behind those
    that come (0: no more than come)."""
    collective, me = Collective(groups, "all_to_all_rows", axis, node), groups.index(axis)

    def start_all_to_all_rows(x: Tensor, splits: Tensor) -> PendingCollective:
        sent, received = reversed(splits.tolist()) if back else splits.tolist()
        whole = x.new_zeros(rows, *x.shape[1:]) if rows else x.new_empty(sum(received), *x.shape[1:])
        out, gone = whole[: sum(received)], x[: sum(sent)].contiguous()
        count(axis, "all_to_all_rows", (sum(sent) - sent[me]) * x.shape[1:].numel() * x.element_size())
        return collective.launch(dist.all_to_all_single, out, gone, received, sent, buffer=whole)

    return start_all_to_all_rows


def _regroup(groups: Groups, node: str, dim: int, src: list[int], dst: list[int], axis: str) -> Start:
    """Shard(d, src) -> Shard(d, dst): the same dim cut otherwise. Each position goes to its new rank."""
    collective, ranks, me = Collective(groups, "all_to_all", axis, node), groups.size(axis), groups.index(axis)

    @functools.cache  # a graph has one size; the positions are copied to a device once
    def positions(size: int, device: torch.device) -> tuple[Tensor, list[int], Tensor, list[int]]:
        before, after = (rows_of(size * ranks, blocks, ranks) for blocks in (src, dst))
        sent = [torch.isin(before[me], after[r]).nonzero()[:, 0] for r in range(ranks)]
        received = [torch.isin(after[me], before[r]).nonzero()[:, 0] for r in range(ranks)]
        places, order = torch.cat(sent), torch.cat(received).argsort()
        return places.to(device), [len(s) for s in sent], order.to(device), [len(r) for r in received]

    def start_all_to_all(x: Tensor) -> PendingCollective:
        places, sent, order, received = positions(x.shape[dim], x.device)
        rows = x.movedim(dim, 0).index_select(0, places)
        out = torch.empty_like(rows)
        return collective.launch(
            dist.all_to_all_single,
            out,
            rows,
            received,
            sent,
            buffer=out,
            done=lambda r: r.index_select(0, order).movedim(0, dim).contiguous(),
        )

    return start_all_to_all


def _flat(x: Tensor) -> Tensor:
    return x.contiguous().view(-1)


def shard_slice(groups: Groups, dim: int, blocks: list[int], axis: str, units: int = 0) -> Callable[[Tensor], Tensor]:
    """This rank's piece; a view where the piece is contiguous in the whole."""
    ranks, me = groups.size(axis), groups.index(axis)

    def slice_shard(x: Tensor) -> Tensor:
        return piece(x, Shard(dim, scaled_blocks(blocks, x.shape[dim]), units=units), ranks, me).contiguous()

    return slice_shard


def shard_pad(groups: Groups, dim: int, blocks: list[int], axis: str, units: int = 0) -> Callable[[Tensor], Tensor]:
    """The whole, zero but for this rank's piece."""
    ranks, me = groups.size(axis), groups.index(axis)

    def pad_shard(x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[dim] *= ranks
        whole = x.new_zeros(shape)
        sizes = scaled_blocks(blocks, shape[dim]) or (shape[dim],)
        parts = x.split([abs(b) // ranks for b in sizes], dim)
        for block, target, part in zip(sizes, whole.split([abs(b) for b in sizes], dim), parts):
            length = part.shape[dim]
            target.narrow(dim, place_in_block(block, ranks, me) * length, length).copy_(part)
        return crop_blocks(whole, dim, blocks, units, ranks).contiguous()

    return pad_shard

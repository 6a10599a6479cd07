"""What a rank holds of a whole tensor that axes of a mesh cut, or few stages hold: which positions, and how it is
cut and gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.adapters.distributed import all_gather_single
from autopar.ir.mesh import AXES
from autopar.ir.placement import Placement, Shard, piece, place_in_block
from autopar.runtime.comm.collectives import from_rows
from autopar.runtime.fault.errors import explained

Cuts = tuple[tuple[str, Shard], ...]  # the axes that cut the tensor, in cut order


def cuts_of(placements: Mapping[str, Placement], sizes: Mapping[str, int]) -> Cuts:
    """The shards of a parameter on axes of more than one rank, in cut order (inner axes first)."""
    found = {a: p for a, p in placements.items() if isinstance(p, Shard) and sizes.get(a, 1) > 1}
    return tuple((a, found[a]) for a in reversed(AXES) if a in found)


@dataclass(frozen=True)
class ShardRange:
    """Consecutive positions in every dim: where they start in the whole and in the local tensor, and how many."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    local: tuple[int, ...]

    def of_local(self, local: Tensor) -> Tensor:
        """The box as a view of the local tensor."""
        for dim, (at, length) in enumerate(zip(self.local, self.size)):
            local = local.narrow(dim, at, length)
        return local


def boxes(
    shape: Sequence[int], cuts: Cuts, sizes: Mapping[str, int], coordinate: Mapping[str, int]
) -> list[ShardRange]:
    """What the rank at a coordinate holds of a tensor of this (whole) shape."""
    runs = [_runs(size, dim, cuts, sizes, coordinate) for dim, size in enumerate(shape)]
    found = itertools.product(*runs)
    return [ShardRange(*(tuple(r[i] for r in box) for i in range(3))) for box in found]


def _runs(
    size: int, dim: int, cuts: Cuts, sizes: Mapping[str, int], coordinate: Mapping[str, int]
) -> list[tuple[int, int, int]]:
    """(global start, length, local start) of each run of consecutive positions of a dim that this rank holds."""
    held = [range(size)]
    for axis, shard in cuts:
        if shard.dim == dim:
            held = _piece_of(held, shard, sizes[axis], coordinate[axis])
    out: list[tuple[int, int, int]] = []
    at = 0
    for run in held:
        if out and out[-1][0] + out[-1][1] == run.start:
            out[-1] = (out[-1][0], out[-1][1] + len(run), out[-1][2])
        else:
            out.append((run.start, len(run), at))
        at += len(run)
    return out


def _piece_of(held: list[range], shard: Shard, ranks: int, rank: int) -> list[range]:
    """What a rank holds of positions that are cut once more."""
    out: list[range] = []
    start = 0
    for block in shard.blocks or (sum(map(len, held)),):
        rows = abs(block) // ranks
        out += _between(held, start + place_in_block(block, ranks, rank) * rows, rows)
        start += abs(block)
    return out


def _between(held: list[range], start: int, rows: int) -> Iterator[range]:
    """Those of the positions that stand in start .. start + rows."""
    for run in held:
        if part := run[max(start, 0) : max(start + rows, 0)]:
            yield part
        start -= len(run)


STAGES = "pp"  # the axis of pipeline stages


@dataclass(frozen=True)
class Holders:
    """The stages that hold a tensor, by their coordinates on pp; others have a piece of no elements. It is read from
    the first one. ``here``: whether this rank's stage is one of them."""

    stages: tuple[int, ...]
    here: bool


def piece_of(whole: Tensor, mesh: DeviceMesh, cuts: Cuts, holders: Holders | None = None) -> Tensor:
    """This rank's piece of a whole tensor; a view where no cut has blocks."""
    if holders is not None and not holders.here:
        return nothing_of(whole)
    for axis, shard in cuts:
        whole = piece(whole, shard, mesh.get_group(axis).size(), mesh.get_local_rank(axis))
    return whole


def nothing_of(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The piece of a rank whose stage does not hold the tensor."""
    return x.new_empty(0, dtype=dtype)


def from_holder(value: Tensor, mesh: DeviceMesh, holders: Holders, shape: Sequence[int]) -> Tensor:
    """The tensor of the first of the stages that hold it, on all of them; ``shape``: that it has there."""
    group, source = mesh.get_group(STAGES), holders.stages[0]
    sent = value.contiguous() if group.rank() == source else value.new_empty(tuple(shape))
    Gathered.count += sent.numel() > 1
    if sent.numel():
        with explained("reading a parameter of another stage", dist.get_process_group_ranks(group)):
            dist.broadcast(sent.reshape(-1).view(torch.uint8), group=group, group_src=source)
    return sent


def shape_of_piece(shape: Sequence[int], mesh: DeviceMesh, cuts: Cuts) -> list[int]:
    """That of a piece on a stage that holds the tensor."""
    found = list(shape)
    for axis, shard in cuts:
        found[shard.dim] //= mesh.get_group(axis).size()
    return found


class Gathered:
    """How many tensors this process has gathered, or read from another stage."""

    count = 0


def gather(value: Tensor, group: dist.ProcessGroup, shard: Shard) -> Tensor:
    """The pieces of a group, joined."""
    Gathered.count += 1
    return from_rows(gathered_rows(value, group), shard.dim, shard.blocks)


def gathered_rows(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: what each rank of a group holds."""
    rows = value.new_empty((group.size(), *value.shape))
    with explained("gathering a parameter", dist.get_process_group_ranks(group)):
        all_gather_single(rows.view(-1), value.contiguous().view(-1), group=group)
    return rows

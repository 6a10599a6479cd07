"""What a rank holds of a whole tensor that axes of a mesh cut, or few stages hold: which positions, and how it is
cut and gathered.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.adapters.dispatch import without_modes
from autopar.adapters.distributed import all_gather_single
from autopar.ir.mesh import AXES
from autopar.ir.placement import (
    Held,
    Placement,
    Shard,
    held_positions,
    nested_shape,
    stored_piece,
    stored_shape,
    with_padding,
    without_padding,
)
from autopar.runtime.comm.collectives import joined
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
    held = tuple((shard, sizes[axis], coordinate[axis]) for axis, shard in cuts if shard.dim == dim)
    return list(_runs_of(size, held))


@functools.lru_cache(4096)
def _runs_of(size: int, held: Held) -> tuple[tuple[int, int, int], ...]:
    if not held:
        return ((0, size, 0),) if size else ()
    with without_modes():
        places = [place for place in held_positions(size, held).tolist() if place >= 0]
    if not places:
        return ()
    starts = [0, *(i for i in range(1, len(places)) if places[i] != places[i - 1] + 1), len(places)]
    return tuple((places[a], b - a, a) for a, b in pairwise(starts))


STAGES = "pp"  # the axis of pipeline stages


@dataclass(frozen=True)
class Holders:
    """The stages that hold a tensor, by their coordinates on pp; others have a piece of no elements. It is read from
    the first one. ``here``: whether this rank's stage is one of them."""

    stages: tuple[int, ...]
    here: bool


def piece_of(whole: Tensor, mesh: DeviceMesh, cuts: Cuts, holders: Holders | None = None) -> Tensor:
    """This rank's piece of a whole tensor, without padding; a view where no cut has blocks."""
    if holders is not None and not holders.here:
        return nothing_of(whole)
    return stored_piece(whole, *_place(mesh, cuts))


def _place(mesh: DeviceMesh, cuts: Cuts) -> tuple[dict[str, Placement], dict[str, int], dict[str, int]]:
    """Placements, sizes and coordinate on the axes that cut a tensor, in cut order."""
    sizes = {axis: mesh.get_group(axis).size() for axis, _ in cuts}
    return dict(cuts), sizes, {axis: mesh.get_local_rank(axis) for axis, _ in cuts}


def padded_piece(value: Tensor, shape: Sequence[int], mesh: DeviceMesh, cuts: Cuts) -> Tensor:
    """This rank's piece of a tensor of ``shape`` with padding, so that all ranks have one shape."""
    return with_padding(value, shape, *_place(mesh, cuts)) if is_padded(cuts) else value


def cropped_piece(value: Tensor, shape: Sequence[int], mesh: DeviceMesh, cuts: Cuts) -> Tensor:
    """The inverse of `padded_piece`."""
    return without_padding(value, shape, *_place(mesh, cuts)) if is_padded(cuts) else value


def is_padded(cuts: Cuts) -> bool:
    """Whether pieces of some ranks may have padding."""
    return any(shard.units for _, shard in cuts)


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


def shape_of_piece(shape: Sequence[int], mesh: DeviceMesh, cuts: Cuts, padded: bool = False) -> list[int]:
    """That of a piece on a stage that holds the tensor; ``padded``: with padding."""
    placements, sizes, coordinate = _place(mesh, cuts)
    return list(
        nested_shape(shape, placements, sizes) if padded else stored_shape(shape, placements, sizes, coordinate)
    )


class Gathered:
    """How many tensors this process has gathered, or read from another stage."""

    count = 0


def gather(value: Tensor, group: dist.ProcessGroup, shard: Shard) -> Tensor:
    """The pieces of a group, which are padded, joined."""
    Gathered.count += 1
    return joined(gathered_rows(value, group), shard.dim, shard.blocks, shard.units)


def gathered_rows(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: what each rank of a group holds."""
    rows = value.new_empty((group.size(), *value.shape))
    with explained("gathering a parameter", dist.get_process_group_ranks(group)):
        all_gather_single(rows.view(-1), value.contiguous().view(-1), group=group)
    return rows

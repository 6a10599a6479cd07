"""From a whole tensor to what a rank holds of it, and back: of one that axes of a mesh cut, or few stages hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.adapters.distributed import all_gather_single
from autopar.ir.placement import Shard, piece
from autopar.runtime.comm.shard_layout import from_rows
from autopar.runtime.fault.errors import explained
from autopar.runtime.params.shard_ranges import Cuts

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


def gather(value: Tensor, group: dist.ProcessGroup, shard: Shard) -> Tensor:
    """The pieces of a group, joined."""
    return from_rows(gathered_rows(value, group), shard.dim, shard.blocks)


def gathered_rows(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: what each rank of a group holds."""
    rows = value.new_empty((group.size(), *value.shape))
    with explained("gathering a parameter", dist.get_process_group_ranks(group)):
        all_gather_single(rows.view(-1), value.contiguous().view(-1), group=group)
    return rows

"""From a whole tensor to what a rank holds of it, and back: of one that axes of a mesh cut."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.adapters.distributed import all_gather_single
from autopar.ir.placement import Shard, piece
from autopar.runtime.boxes import Cuts
from autopar.runtime.failures import explained
from autopar.runtime.layout import from_rows


def piece_of(whole: Tensor, mesh: DeviceMesh, cuts: Cuts) -> Tensor:
    """This rank's piece of a whole tensor; a view where no cut has blocks."""
    for axis, shard in cuts:
        whole = piece(whole, shard, mesh.get_group(axis).size(), mesh.get_local_rank(axis))
    return whole


def gather(value: Tensor, group: dist.ProcessGroup, shard: Shard) -> Tensor:
    """The pieces of a group, joined."""
    return from_rows(gathered_rows(value, group), shard.dim, shard.blocks)


def gathered_rows(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: what each rank of a group holds."""
    rows = value.new_empty((group.size(), *value.shape))
    with explained("gathering a parameter", dist.get_process_group_ranks(group)):
        all_gather_single(rows.view(-1), value.contiguous().view(-1), group=group)
    return rows

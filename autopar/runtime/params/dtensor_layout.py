"""How any DTensor lies on its mesh: a ShardedTensor, or one of torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard as TorchShard

from autopar.ir.placement import Shard
from autopar.runtime.params.gather_shards import STAGES, from_holder
from autopar.runtime.params.shard_ranges import Cuts, cuts_of
from autopar.runtime.params.sharded_tensor import ShardedTensor


def is_here(x: Tensor) -> bool:
    """Whether this rank's pipeline stage holds a tensor."""
    return not isinstance(x, ShardedTensor) or x.is_here


def told_by_holder(x: Tensor, said: bool) -> bool:
    """What is said of a tensor by the pipeline stage that holds it. Collective over stages, where not all hold it."""
    if not isinstance(x, ShardedTensor) or x.holders is None:
        return said
    return bool(from_holder(torch.tensor(said, device=x.device), x.device_mesh, x.holders, ()))


def is_apart(x: DTensor) -> bool:
    """Whether some rank does not hold all of it."""
    return x.is_apart if isinstance(x, ShardedTensor) else bool(shards_of(x))


def shards_of(x: DTensor) -> Cuts:
    """The shards of a DTensor, in cut order (inner axes first)."""
    if isinstance(x, ShardedTensor):
        return x.cuts
    named = zip(x.device_mesh.mesh_dim_names or (), x.placements, strict=True)
    cut = {axis: Shard(p.dim) for axis, p in named if isinstance(p, TorchShard)}
    return cuts_of(cut, {axis: x.device_mesh.get_group(axis).size() for axis in cut})


def reduction_groups(x: DTensor) -> Sequence[dist.ProcessGroup]:
    """The groups over which the pieces of a DTensor differ."""
    if isinstance(x, ShardedTensor):
        stages = [STAGES] if x.holders is not None else []
        return [x.device_mesh.get_group(axis) for axis in (*stages, *(axis for axis, _ in x.cuts))]
    return [x.device_mesh.get_group(i) for i, p in enumerate(x.placements) if p.is_shard()]

"""The layout of any DTensor on its mesh, and states with the layout of their parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard as TorchShard

from autopar.adapters.dtensor import local_of
from autopar.ir.placement import Shard
from autopar.runtime.params.sharded_tensor import ShardedTensor
from autopar.runtime.params.shards import STAGES, Cuts, cuts_of, from_holder


def as_local(x: Any) -> Any:
    """The local tensor of a DTensor; anything else unchanged."""
    return local_of(x) if isinstance(x, DTensor) else x


def is_here(x: Tensor) -> bool:
    """Whether this rank's pipeline stage holds a tensor."""
    return not isinstance(x, ShardedTensor) or x.is_here


def told_by_holder(x: Tensor, said: bool) -> bool:
    """The flag ``said`` of the pipeline stage that holds a tensor. Collective over stages if not all hold it."""
    if not isinstance(x, ShardedTensor) or x.holders is None:
        return said
    return bool(from_holder(torch.tensor(said, device=x.device), x.device_mesh, x.holders, ()))


def is_apart(x: DTensor) -> bool:
    """Whether it is sharded: some rank does not hold all of it."""
    return x.is_apart if isinstance(x, ShardedTensor) else bool(shards_of(x))


def shards_of(x: DTensor) -> Cuts:
    """The sharded dims of a DTensor with their axes, inner axes first."""
    if isinstance(x, ShardedTensor):
        return x.cuts
    named = zip(x.device_mesh.mesh_dim_names or (), x.placements, strict=True)
    cut = {axis: Shard(p.dim) for axis, p in named if isinstance(p, TorchShard)}
    return cuts_of(cut, {axis: x.device_mesh.get_group(axis).size() for axis in cut})


def reduction_groups(x: DTensor) -> Sequence[dist.ProcessGroup]:
    """The groups over which a DTensor is sharded."""
    if isinstance(x, ShardedTensor):
        stages = [STAGES] if x.holders is not None else []
        return [x.device_mesh.get_group(axis) for axis in (*stages, *(axis for axis, _ in x.cuts))]
    return [x.device_mesh.get_group(i) for i, p in enumerate(x.placements) if p.is_shard()]


def laid_out(p: nn.Parameter, x: Tensor) -> ShardedTensor:
    """A state of a parameter, full or this rank's shard, as a tensor with the parameter's layout."""
    assert isinstance(p, ShardedTensor)
    made = x.detach()
    return p.like(made if made.shape == local_of(p).shape else p.laid_as(made, "optimizer"))

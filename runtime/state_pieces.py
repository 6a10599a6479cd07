"""What an optimizer keeps of a parameter, laid out as the parameter is."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.adapters.dtensor import local_of
from autopar.runtime.sharded_tensor import ShardedTensor, boxes, shards_of


def laid_out(p: nn.Parameter, x: Tensor) -> DTensor:
    """The whole, or this rank's piece, of a state of a parameter, laid out as it is."""
    like: DTensor = p  # type: ignore[assignment]
    local, made = local_of(like), x.detach()
    if made.shape != local.shape:
        made = torch.empty(local.shape, dtype=x.dtype, device=local.device)
        write_piece(made, x.detach(), p)
    if isinstance(like, ShardedTensor):
        return like.like(made)
    mesh, shape = like.device_mesh, like.shape
    return DTensor.from_local(made, mesh, like.placements, run_check=False, shape=shape, stride=like.stride())


def write_piece(local: Tensor, whole: Tensor, p: nn.Parameter) -> None:
    """What this rank holds of a whole tensor that is laid out as a parameter."""
    x: DTensor = p  # type: ignore[assignment]
    mesh, cuts = x.device_mesh, shards_of(x)
    coordinate = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or ()))
    sizes = {axis: mesh.get_group(axis).size() for axis, _ in cuts}
    for box in boxes(x.shape, cuts, sizes, coordinate):
        part = whole
        for dim, (start, size) in enumerate(zip(box.start, box.size)):
            part = part.narrow(dim, start, size)
        box.of_local(local).copy_(part)

"""What an optimizer keeps of a parameter, laid out as the parameter is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.adapters.dtensor import local_of
from autopar.runtime.params.sharded_tensor import ShardedTensor


def laid_out(p: nn.Parameter, x: Tensor) -> ShardedTensor:
    """The whole, or this rank's piece, of a state of a parameter, laid out as it is."""
    assert isinstance(p, ShardedTensor)
    local, made = local_of(p), x.detach()
    if made.shape != local.shape:
        made = torch.empty(local.shape, dtype=x.dtype, device=local.device)
        write_piece(made, x.detach(), p)
    return p.like(made)


def write_piece(local: Tensor, whole: Tensor, p: nn.Parameter) -> None:
    """What this rank holds of a whole tensor that is laid out as a parameter."""
    assert isinstance(p, ShardedTensor)
    for box in p.chunks():
        part = whole
        for dim, (start, size) in enumerate(zip(box.start, box.size)):
            part = part.narrow(dim, start, size)
        box.of_local(local).copy_(part)

"""Optimizers that compute with whole matrices, on parameters that are cut: each gets one whole matrix at a time.

    torch.optim.Muon(model.parameters()).step()

        for each parameter:  weight, gradient and states of its shape are gathered; the optimizer steps this one;
                             the piece and the pieces of its states are kept

So the update is that of one process, bit for bit, and no more than one matrix is whole at a time. (On DTensors as such
Muon's products round in another order, in bfloat16, and Adafactor stops.) States of other shapes, such as Adafactor's
rows and columns, are whole on every rank of the pipeline stage that holds the parameter; other stages have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.adapters.dtensor import local_of
from autopar.runtime.optim.cpu_offload import OffloadedStates
from autopar.runtime.optim.local_step import own_step
from autopar.runtime.params.dtensor_layout import is_here, shards_of
from autopar.runtime.params.sharded_tensor import ShardedTensor
from autopar.runtime.params.state_layout import laid_out, write_piece

# By the name of the class, whichever library it is of: what they do with a matrix is no function of its elements alone.
WHOLE = {
    "Muon",
    "MuonClip",
    "NorMuon",
    "Adafactor",
    "Shampoo",
    "DistributedShampoo",
    "SOAP",
    "CAME",
    "Apollo",
    "GaLore",
}


@torch.no_grad()
def step_each(optimizer: Optimizer, is_ours: Callable[[Tensor], bool], hosts: OffloadedStates | None) -> None:
    """Step our parameters one by one, of each the whole as a plain tensor. ``hosts``: where states lie in host
    memory."""
    step, groups = own_step(optimizer), optimizer.param_groups
    try:
        for group in groups:
            before = {name: value for name, value in group.items() if name != "params"}
            for p in group["params"]:
                if is_ours(p) and p.grad is not None and not is_here(p):
                    local_of(p).zero_()  # nothing, which counts as written on all stages
                elif is_ours(p) and p.grad is not None:
                    only = {**before, "params": [_whole(p, p)]}
                    optimizer.param_groups = [only]
                    if hosts is not None:
                        hosts.bring([p])()
                    _step_one(optimizer, p, only["params"][0], step)
                    if hosts is not None:
                        hosts.put_away([p])()
                    group.update({name: value for name, value in only.items() if name != "params"})
    finally:
        optimizer.param_groups = groups


def _step_one(optimizer: Optimizer, p: nn.Parameter, plain: nn.Parameter, step: Any) -> None:
    assert p.grad is not None
    plain.grad = _whole(p, p.grad).detach()
    state = optimizer.state.pop(p, {})
    optimizer.state[plain] = {n: _whole(p, x).detach() if _is_like(x, p) else x for n, x in state.items()}
    try:
        step(optimizer)
    finally:
        made = optimizer.state.pop(plain, {})
        optimizer.state[p] = {n: laid_out(p, x) if _is_like(x, plain) else x for n, x in made.items()}
    local = local_of(p)  # type: ignore[arg-type]
    if plain.untyped_storage().data_ptr() != local.untyped_storage().data_ptr():
        write_piece(local, plain.detach(), p)


def _is_like(x: Any, p: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == p.shape and x.dim() > 0


def _whole(p: nn.Parameter, x: Any) -> nn.Parameter:
    """A value laid out as a parameter as a plain tensor, which shares its storage where it is whole here."""
    if isinstance(x, ShardedTensor):
        x = x.on_stage()
    elif isinstance(x, DTensor):
        x = x.full_tensor() if shards_of(x) else local_of(x)
    return nn.Parameter(x.detach(), requires_grad=p.requires_grad)

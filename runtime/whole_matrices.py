"""Optimizers that compute with whole matrices, on parameters that are cut: each gets one whole matrix at a time.

    torch.optim.Muon(model.parameters()).step()

        for each parameter:  weight, gradient and states of its shape are gathered; the optimizer steps this one;
                             the piece and the pieces of its states are kept

So the update is that of one process, bit for bit, and no more than one matrix is whole at a time. (On DTensors as such
Muon's products round in another order, in bfloat16, and Adafactor stops.) States of other shapes, such as Adafactor's
rows and columns, are whole on every rank. Elementwise optimizers step pieces as they are, and are left alone, but for
those whose kernels DTensor does not know: they get the pieces as plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.adapters.dtensor import local_of
from autopar.runtime.host_states import HostStates
from autopar.runtime.sharded_tensor import ShardedTensor, boxes, shards_of

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
PLAIN = {"Rprop"}  # elementwise, but by index
# --- one parameter at a time --------------------------------------------------------------------------------


@torch.no_grad()
def step_each(optimizer: Optimizer, is_ours: Callable[[Tensor], bool], whole: bool, hosts: HostStates | None) -> None:
    """Step our parameters one by one: of each the whole (``whole``) or the piece, as a plain tensor. ``hosts``: where
    states lie in host memory."""
    step: Callable[[Optimizer], Any] = type(optimizer).step
    step = getattr(step, "__wrapped__", step)  # without hooks: theirs run once per step
    groups = optimizer.param_groups
    try:
        for group in groups:
            before = {name: value for name, value in group.items() if name != "params"}
            for p in group["params"]:
                if is_ours(p) and p.grad is not None:
                    only = {**before, "params": [_plain(p, p, whole)]}
                    optimizer.param_groups = [only]
                    if hosts is not None:
                        hosts.bring([p])()
                    _step_one(optimizer, p, only["params"][0], step, whole)
                    if hosts is not None:
                        hosts.put_away([p])()
                    group.update({name: value for name, value in only.items() if name != "params"})
    finally:
        optimizer.param_groups = groups


def _step_one(optimizer: Optimizer, p: nn.Parameter, plain: nn.Parameter, step: Any, whole: bool) -> None:
    assert p.grad is not None
    plain.grad = _plain(p, p.grad, whole).detach()
    state = optimizer.state.pop(p, {})
    optimizer.state[plain] = {n: _plain(p, x, whole).detach() if _is_like(x, p) else x for n, x in state.items()}
    try:
        step(optimizer)
    finally:
        made = optimizer.state.pop(plain, {})
        optimizer.state[p] = {n: laid_out(p, x) if _is_like(x, plain) else x for n, x in made.items()}
    local = local_of(p)  # type: ignore[arg-type]
    if plain.untyped_storage().data_ptr() != local.untyped_storage().data_ptr():
        _write_piece(local, plain.detach(), p)


def _is_like(x: Any, p: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == p.shape and x.dim() > 0


def _plain(p: nn.Parameter, x: Any, whole: bool) -> nn.Parameter:
    """A value laid out as a parameter as a plain tensor: the whole, or the piece, which shares its storage."""
    if isinstance(x, DTensor):
        x = x.full_tensor() if whole and shards_of(x) else local_of(x)
    return nn.Parameter(x.detach(), requires_grad=p.requires_grad)


def laid_out(p: nn.Parameter, x: Tensor) -> DTensor:
    """The whole, or this rank's piece, of a state of a parameter, laid out as it is."""
    like: DTensor = p  # type: ignore[assignment]
    local, made = local_of(like), x.detach()
    if made.shape != local.shape:
        made = torch.empty(local.shape, dtype=x.dtype, device=local.device)
        _write_piece(made, x.detach(), p)
    if isinstance(like, ShardedTensor):
        return like.like(made)
    mesh, shape = like.device_mesh, like.shape
    return DTensor.from_local(made, mesh, like.placements, run_check=False, shape=shape, stride=like.stride())


def _write_piece(local: Tensor, whole: Tensor, p: nn.Parameter) -> None:
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

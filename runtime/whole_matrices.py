"""Optimizers that compute with whole matrices, on parameters that are cut: each gets one whole matrix at a time.

    torch.optim.Muon(model.parameters()).step()

        for each parameter:  weight, gradient and states of its shape are gathered; the optimizer steps this one;
                             the piece and the pieces of its states are kept

torch calls the hooks of a step with the optimizer, and the step itself with a stand-in: that does the above when it is
asked for its groups, and then has none. So hooks run before and after, and an error of theirs leaves all as it is.

So the update is that of one process, bit for bit, and no more than one matrix is whole at a time. (On DTensors as such
Muon's products round in another order, in bfloat16, and Adafactor stops.) States of other shapes, such as Adafactor's
rows and columns, are whole on every rank. Elementwise optimizers step pieces as they are, and are left alone, but for
those whose kernels DTensor does not know: they get the pieces as plain tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.adapters.dtensor import local_of
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
_TOGETHER = {"LBFGS"}  # one problem of all parameters

_STAGES: dict[DeviceMesh, int] = {}  # meshes of our parameters -> how many stages there are


def watch_optimizers(mesh: DeviceMesh, stages: int) -> None:
    """Of the optimizers of parameters on a mesh those that need it get whole matrices from now on. (Nothing is kept of
    the parameters: torch exchanges no tensor in place that somebody has a weak reference to, as ``model.to`` does.)"""
    _STAGES[mesh] = stages
    _watching()


def _is_ours(p: Tensor) -> bool:
    return isinstance(p, DTensor) and p.device_mesh in _STAGES


@functools.cache
def _watching() -> Any:
    return register_optimizer_step_pre_hook(_before)


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    ours = [p for group in optimizer.param_groups for p in group["params"] if _is_ours(p)]
    if not ours:
        return None
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    if names & _TOGETHER:
        _check_together(optimizer, ours)
    whole = bool(names & WHOLE)
    if not whole and not names & PLAIN and not _unknown_kernels(optimizer, names, ours):
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
        args, kwargs = (optimizer, lambda: loss), {k: v for k, v in kwargs.items() if k != "closure"}
    return (_stand_in(optimizer, whole), *args[1:]), kwargs


def _stand_in(optimizer: Optimizer, whole: bool) -> Optimizer:
    """An optimizer of the same kind for one call of its step. Its attributes are those of ``optimizer``, but for the
    groups: who reads them first has our parameters stepped, and finds those that are none of ours."""
    left: list[dict[str, Any]] = []

    def groups(_: Any) -> list[dict[str, Any]]:
        if not left:
            _step_each(optimizer, whole)
            left.extend(_Others(group) for group in optimizer.param_groups)
        return [group for group in left if group["params"]]

    kind = type(type(optimizer).__name__, (type(optimizer),), {"param_groups": property(groups)})
    made: Optimizer = object.__new__(kind)
    made.__dict__ = optimizer.__dict__
    return made


class _Others(dict[str, Any]):
    """A group without our parameters; what is written to it is written to the group."""

    def __init__(self, group: dict[str, Any]) -> None:
        super().__init__(group, params=[p for p in group["params"] if not _is_ours(p)])
        self._group = group

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._group[name] = value


def _unknown_kernels(optimizer: Optimizer, names: set[str], ours: list[Tensor]) -> bool:
    """Fused SGD and Adagrad of DTensors, which ShardedTensors know."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return fused and bool(names & {"SGD", "Adagrad"}) and any(type(p) is DTensor for p in ours)


def _check_together(optimizer: Optimizer, ours: list[Any]) -> None:
    name = type(optimizer).__name__
    if any(_STAGES[p.device_mesh] > 1 for p in ours):
        raise ValueError(
            f"optimizer: {name} solves one problem of all parameters, found stages that hold a part of them each; "
            "use a mesh without pp, or an optimizer that steps each parameter by itself"
        )
    if any(isinstance(p, ShardedTensor) for p in ours):
        raise ValueError(
            f"optimizer: {name} lays all parameters end to end, found some that several axes cut along one dim; "
            "use zero=0, or an optimizer that steps each parameter by itself"
        )


# --- one parameter at a time --------------------------------------------------------------------------------


@torch.no_grad()
def _step_each(optimizer: Optimizer, whole: bool) -> None:
    step: Callable[[Optimizer], Any] = type(optimizer).step
    step = getattr(step, "__wrapped__", step)  # without hooks: theirs run once per step
    groups = optimizer.param_groups
    try:
        for group in groups:
            before = {name: value for name, value in group.items() if name != "params"}
            for p in group["params"]:
                if _is_ours(p) and p.grad is not None:
                    only = {**before, "params": [_plain(p, p, whole)]}
                    optimizer.param_groups = [only]
                    _step_one(optimizer, p, only["params"][0], step, whole)
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

"""Hooks on optimizer steps: they order steps and saves, refuse stale optimizers, and split steps where necessary.

    torch.optim.AdamW(model.parameters()).step()     elementwise, on local shards: `autopar.runtime.optim.local_step`
    torch.optim.Muon(...)                            one parameter at a time, gathered into a plain tensor
    optimizer_cpu_offload=True                       states are copied from the host bucket by bucket:
                                                     `autopar.runtime.optim.cpu_offload`

torch calls the hooks of a step with the optimizer, and the step itself with a stand-in. The stand-in steps our
parameters when its groups are read, and its groups then contain only other parameters. So hooks run before and after,
and if a hook raises, nothing is changed.

A background save has copied what a step writes to before the step begins. A save between two backwards of gradient
accumulation includes the gradients, which no step has used. An optimizer that was created before `parallelize` would
silently do nothing, since its parameters get no gradients: it is refused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar.adapters.autograd import version_of
from autopar.adapters.dtensor import local_of
from autopar.runtime.optim.cpu_offload import OffloadedStates, step_buckets
from autopar.runtime.optim.local_step import own_step, step_pieces, steps_elements
from autopar.runtime.params.dtensor_layout import is_here, laid_out, shards_of
from autopar.runtime.params.sharded_tensor import ShardedTensor

_events = itertools.count(1)
_stepped = WeakIdKeyDictionary()  # optimizer -> time of its last step
_before: list[Callable[[], None]] = []


def now() -> int:
    """A logical time: a number greater than all before."""
    return next(_events)


def note_step(optimizer: Optimizer) -> None:
    """Record that it has made a step, or skipped one: the gradients have been used."""
    _stepped[optimizer] = now()


def is_pending(last_use: int, optimizer: Optimizer) -> bool:
    """Whether gradients of a model last used at ``last_use`` are newer than the optimizer's last step."""
    return last_use > _stepped.get(optimizer, 0)


def before_writes(call: Callable[[], None]) -> None:
    """Register ``call``: it runs before parameters or averages are written to, for instance by an optimizer step."""
    _before.append(call)


def about_to_write() -> None:
    """Call before parameters or averages are written to: waits until a save in flight has copied them."""
    for call in _before:
        call()


# --- optimizers created before parallelize ---------------------------------------------------------------------


_PLACED = WeakIdKeyDictionary()  # original parameter -> its version when an optimizer last stepped it


def note_parameters(parameters: Iterable[Tensor]) -> None:
    """Record the original parameters of a parallelized model. Optimizers are watched from the first call on."""
    for parameter in parameters:
        _PLACED.setdefault(parameter, -1)
    _watch()


def version_after_step(parameter: Tensor) -> int:
    """The version of an original parameter when an optimizer last stepped it; -1 if none has."""
    return int(_PLACED.get(parameter, -1))


def _refuse_stale(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        parameters = group["params"]
        if parameters and parameters[0] in _PLACED and all(p.grad is None for p in parameters):
            raise ValueError(
                f"optimizer: this {type(optimizer).__name__} was created from the model's parameters before "
                "parallelize, so it would step weights that the parallel model does not use; create it from the "
                f"parallel model's: {type(optimizer).__name__}(parallel.parameters(), ...)"
            )


# --- optimizers on unsharded matrices --------------------------------------------------------------------------


# By class name, of any library: their update of a matrix is not elementwise.
WHOLE = {
    "Muon", "MuonClip", "NorMuon", "Adafactor", "Shampoo", "DistributedShampoo", "SOAP", "CAME", "Apollo", "GaLore",
}  # fmt: skip


def needs_whole(optimizer: Optimizer) -> bool:
    """Whether it is one of these classes, or derives from one."""
    return not WHOLE.isdisjoint(cls.__name__ for cls in type(optimizer).__mro__)


@torch.no_grad()
def step_each(optimizer: Optimizer, is_ours: Callable[[Tensor], bool], hosts: OffloadedStates | None) -> None:
    """Step our parameters one by one, each gathered into a plain tensor. ``hosts``: the offloaded states, if any."""
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
        local.copy_(local_of(laid_out(p, plain)))


def _is_like(x: Any, p: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == p.shape and x.dim() > 0


def _whole(p: nn.Parameter, x: Any) -> nn.Parameter:
    """A value sharded like a parameter as a full plain tensor, which shares storage with it if it is not sharded."""
    if isinstance(x, ShardedTensor):
        x = x.on_stage()
    elif isinstance(x, DTensor):
        x = x.full_tensor() if shards_of(x) else local_of(x)
    return nn.Parameter(x.detach(), requires_grad=p.requires_grad)


# --- every step ------------------------------------------------------------------------------------------------


_MESHES: set[DeviceMesh] = set()  # meshes of our parameters


def watch_optimizers(mesh: DeviceMesh) -> None:
    """From now on optimizers of parameters on this mesh are stepped by our code if they need it. (Parameters are not
    recorded: torch does not swap a tensor in place, as ``model.to`` does, if it has weak references.)"""
    _MESHES.add(mesh)
    _watch()


@functools.cache
def _watch() -> Any:
    """Watch every step of every optimizer from now on."""
    return register_optimizer_step_pre_hook(_begin), register_optimizer_step_post_hook(_end)


def _begin(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _refuse_stale(optimizer)
    found = _taken_apart(optimizer, args, kwargs)
    about_to_write()
    return found


def _end(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not isinstance(p, DTensor) and p in _PLACED and p.grad is not None:  # an original, not a shard
                _PLACED[p] = version_of(p)
    note_step(optimizer)


def _is_ours(p: Tensor) -> bool:
    return isinstance(p, DTensor) and p.device_mesh in _MESHES


def _taken_apart(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    ours = [p for group in optimizer.param_groups for p in group["params"] if _is_ours(p)]
    if not ours:
        return None
    hosts = OffloadedStates.of(optimizer, ours)
    step: Callable[[], None]
    if needs_whole(optimizer):
        step = functools.partial(step_each, optimizer, _is_ours, hosts)
    elif hosts is not None:
        step = functools.partial(step_buckets, optimizer, _is_ours, hosts)
    elif steps_elements(optimizer, ours):
        step = functools.partial(step_pieces, optimizer, _is_ours)
    else:
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
    if closure is None:
        return (_stand_in(optimizer, step), *args[1:]), kwargs
    loss = functools.cache(torch.enable_grad()(closure))
    kwargs = {k: v for k, v in kwargs.items() if k != "closure"}
    return (_stand_in(optimizer, step, loss), loss), kwargs


def _stand_in(optimizer: Optimizer, step: Callable[[], None], loss: Callable[[], Any] | None = None) -> Optimizer:
    """An optimizer of the same class for one call of its step. It shares the attributes of ``optimizer`` except its
    groups: the first read of these steps our parameters, after the ``loss`` that computes their gradients, and returns
    groups without them."""
    left: list[dict[str, Any]] = []

    def groups(_: Any) -> list[dict[str, Any]]:
        if not left:
            if loss is not None:
                loss()
            step()
            left.extend(_Others(group) for group in optimizer.param_groups)
        return [group for group in left if group["params"]]

    kind = type(type(optimizer).__name__, (type(optimizer),), {"param_groups": property(groups)})
    made: Optimizer = object.__new__(kind)
    made.__dict__ = optimizer.__dict__
    return made


class _Others(dict[str, Any]):
    """A group without our parameters; writes to it go to the original group."""

    def __init__(self, group: dict[str, Any]) -> None:
        super().__init__(group, params=[p for p in group["params"] if not _is_ours(p)])
        self._group = group

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._group[name] = value

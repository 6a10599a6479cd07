"""Steps of optimizers whose parameters are ours: taken apart, where all parameters at once will not do.

    torch.optim.AdamW(model.parameters()).step()     elementwise, on pieces: `autopar.runtime.optim.local_step`
    torch.optim.Muon(...)                            one whole matrix at a time: `autopar.runtime.optim.unsharded_step`
    optimizer_cpu_offload=True                           states come from the host bucket by bucket:
                                                     `autopar.runtime.optim.cpu_offload`

torch calls the hooks of a step with the optimizer, and the step itself with a stand-in: that steps our parameters when
it is asked for its groups, and then has none of them. So hooks run before and after, and an error of theirs leaves all
as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.runtime.optim.cpu_offload import OffloadedStates, step_buckets
from autopar.runtime.optim.local_step import step_pieces, steps_elements
from autopar.runtime.optim.unsharded_step import WHOLE, step_each

_MESHES: set[DeviceMesh] = set()  # of our parameters


def watch_optimizers(mesh: DeviceMesh) -> None:
    """Of the optimizers of parameters on a mesh those that need it are stepped in parts from now on. (Nothing is kept
    of the parameters: torch exchanges no tensor in place that somebody has a weak reference to, as ``model.to``
    does.)"""
    _MESHES.add(mesh)
    _watching()


def _is_ours(p: Tensor) -> bool:
    return isinstance(p, DTensor) and p.device_mesh in _MESHES


@functools.cache
def _watching() -> Any:
    return register_optimizer_step_pre_hook(_before)


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    ours = [p for group in optimizer.param_groups for p in group["params"] if _is_ours(p)]
    if not ours:
        return None
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    hosts = OffloadedStates.of(optimizer, ours)
    step: Callable[[], None]
    if names & WHOLE:
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
    """An optimizer of the same kind for one call of its step. Its attributes are those of ``optimizer``, but for the
    groups: who reads them first has our parameters stepped, behind the ``loss`` that makes their gradients, and finds
    those that are none of ours."""
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
    """A group without our parameters; what is written to it is written to the group."""

    def __init__(self, group: dict[str, Any]) -> None:
        super().__init__(group, params=[p for p in group["params"] if not _is_ours(p)])
        self._group = group

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._group[name] = value

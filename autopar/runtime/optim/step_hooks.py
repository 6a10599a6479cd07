"""Hooks on optimizer steps: they order steps and saves, refuse stale optimizers, and step sharded parameters.

    torch.optim.AdamW(model.parameters()).step()     elementwise, on local shards: `autopar.runtime.optim.local_step`
    torch.optim.Muon(...)                            each matrix on its owner: `autopar.runtime.optim.whole_step`
    anybody's                                        in the way that trials find: `autopar.runtime.optim.step_trials`
    optimizer_cpu_offload=True                       states are copied from the host bucket by bucket:
                                                     `autopar.runtime.optim.cpu_offload`

Hooks of a step get the optimizer as it is. Between them, the step of its class runs on shards or on whole parameters.

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
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar.adapters.autograd import version_of
from autopar.adapters.optimizer_step import run_step_by
from autopar.runtime.optim.cpu_offload import OffloadedStates, step_buckets
from autopar.runtime.optim.local_step import on_pieces
from autopar.runtime.optim.step_trials import Way, note_options, way_of
from autopar.runtime.optim.whole_step import step_owned, step_together
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
    watch_optimizers()


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


# --- every step ------------------------------------------------------------------------------------------------


@functools.cache
def watch_optimizers() -> Any:
    """Watch every step of every optimizer from now on: those of our parameters are stepped by our code if they need it.
    (Parameters are not recorded: torch does not swap a tensor in place, as ``model.to`` does, if it has weak
    references.)"""
    return register_optimizer_step_pre_hook(_begin), register_optimizer_step_post_hook(_end)


def _begin(optimizer: Optimizer, *_: Any) -> None:
    _refuse_stale(optimizer)
    run_step_by(optimizer, _run)
    about_to_write()


def _end(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not isinstance(p, DTensor) and p in _PLACED and p.grad is not None:  # an original, not a shard
                _PLACED[p] = version_of(p)
    note_options(optimizer)
    note_step(optimizer)


def _is_ours(p: Tensor) -> bool:
    """DTensors of others may lie on an equal mesh."""
    return isinstance(p, ShardedTensor)


def _run(step: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Run ``step(optimizer, ...)``, on shards or whole parameters in place of ours."""
    ours = [p for group in optimizer.param_groups for p in group["params"] if _is_ours(p)]
    if not ours:
        return step(optimizer, *args, **kwargs)
    hosts = OffloadedStates.of(optimizer, ours)
    if args and callable(args[0]):  # its first argument, as in torch
        args, kwargs = args[1:], {**kwargs, "closure": args[0]}
    found = way_of(optimizer, _is_ours, args, kwargs)
    if found.way is Way.GLOBALLY:
        return step(optimizer, *args, **kwargs)
    if kwargs.get("closure") is not None:
        with torch.enable_grad():
            loss = kwargs["closure"]()
        kwargs["closure"] = lambda: loss
    call = functools.partial(step, optimizer, *args, **kwargs)
    if found.way is Way.TOGETHER:
        return step_together(optimizer, _is_ours, found.draws, call)
    if found.way is Way.OWNERS:
        return step_owned(optimizer, _is_ours, hosts, call)
    if hosts is not None:
        return step_buckets(optimizer, _is_ours, hosts, call)
    with torch.no_grad(), on_pieces(optimizer, _is_ours):
        return call()

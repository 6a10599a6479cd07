"""Elementwise optimizers step local shards: of each parameter, its gradient and its states, as plain tensors.

The result equals that of a step on DTensors, without the overhead of DTensor dispatch, and with kernels that DTensor
does not support: fused SGD and Adagrad, Rprop's indexing. Parameters of other pipeline stages have no elements here:
once they have states, only their step counts advance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.adapters.foreach import add_one
from autopar.runtime.params.dtensor_layout import as_local, is_here, laid_out
from autopar.runtime.params.parameters import is_alike
from autopar.runtime.params.sharded_tensor import ShardedTensor, all_written

_ELEMENTWISE = {  # in torch.optim, by the module that defines `step`
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip
_COUNTS = {"step", "eta", "mu", "mu_product"}  # states without a value per element


def own_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The step of its class without hooks, which run once per step."""
    step: Callable[[Optimizer], Any] = type(optimizer).step
    return getattr(step, "__wrapped__", step)


def steps_elements(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Whether it is elementwise, and gradients have the placements of their parameters."""
    step = own_step(optimizer)
    known = step.__module__.startswith("torch.optim.") and step.__qualname__.partition(".")[0] in _ELEMENTWISE
    return known and all((g := p.grad) is None or (is_alike(p, g) and p.dtype == g.dtype) for p in parameters)


@torch.no_grad()
def step_pieces(optimizer: Optimizer, is_ours: Callable[[Tensor], bool]) -> None:
    """Step our parameters, all at once."""
    with on_pieces(optimizer, is_ours):
        own_step(optimizer)(optimizer)


@contextmanager
def on_pieces(optimizer: Optimizer, is_ours: Callable[[Tensor], bool]) -> Iterator[None]:
    """Context manager: groups and states contain local shards of our parameters. Changes of options are kept."""
    groups, states = optimizer.param_groups, optimizer.state
    found = [(p, p.grad) for group in groups for p in group["params"] if is_ours(p)]
    elsewhere = [p for p, gradient in found if gradient is not None and not is_here(p)]
    counted = {p for p in elsewhere if _only_counts(optimizer, states.get(p, {}))}
    pieces = {p: _piece(p, gradient) for p, gradient in found if gradient is not None and p not in counted}
    ours = list(pieces)
    made: defaultdict[Tensor, Any] = defaultdict(dict)
    for p in (p for p in ours if p in states):
        made[pieces[p]] = {n: _piece_of_state(p, x) for n, x in states[p].items()}
    optimizer.param_groups = [{**g, "params": [pieces[p] for p in g["params"] if p in pieces]} for g in groups]
    optimizer.state = made
    try:
        yield
        add_one([states[p]["step"] for p in counted if "step" in states[p]])
        for p in counted:
            as_local(p).zero_()  # no elements, but bumps the version on all stages
    finally:
        for group, stepped in zip(groups, optimizer.param_groups, strict=True):
            group.update({name: value for name, value in stepped.items() if name != "params"})
        optimizer.param_groups, optimizer.state = groups, states
        for p in (p for p in ours if pieces[p] in made):
            states[p].update(_laid_out(p, made[pieces[p]], states[p]))
        if any(isinstance(p, ShardedTensor) and p.holders is not None for p, _ in found):  # the same on all stages
            all_written()


def _only_counts(optimizer: Optimizer, state: Mapping[str, Any]) -> bool:
    """Whether a step of a parameter without elements only increments its step count. (Not if a scaler passes the step
    a flag for infinite gradients.)"""
    scaled = getattr(optimizer, "found_inf", None) is not None
    return bool(state) and not scaled and not (_COUNTS - {"step"}) & state.keys()


def _piece(p: nn.Parameter, gradient: Tensor) -> nn.Parameter:
    piece = nn.Parameter(as_local(p).detach(), requires_grad=p.requires_grad)
    piece.grad = as_local(gradient).detach()
    return piece


def _piece_of_state(p: nn.Parameter, x: Any) -> Any:
    """An unsharded state, such as one loaded from a file by ``load_state_dict``, is sharded like its parameter."""
    if isinstance(x, Tensor) and x.shape == p.shape and p.cuts and not p.lies_as(x):  # type: ignore[attr-defined]
        return p.laid_as(x.detach(), "optimizer")  # type: ignore[attr-defined]
    return as_local(x)


def _laid_out(p: nn.Parameter, made: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """States of a parameter as DTensors over local shards; states changed in place keep their object."""
    changed = {n: x for n, x in made.items() if n not in before or as_local(before[n]) is not x}
    return {n: laid_out(p, x) if isinstance(x, Tensor) and n not in _COUNTS else x for n, x in changed.items()}

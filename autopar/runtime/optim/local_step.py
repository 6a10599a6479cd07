"""Elementwise optimizers step local shards: of each parameter, its gradient and its states, as plain tensors.

The result equals that of a step on DTensors, without the overhead of DTensor dispatch, and with kernels that DTensor
does not support: fused SGD and Adagrad, Rprop's indexing. Parameters of other pipeline stages have no elements here:
once they have states, only their step counts advance.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.adapters.foreach import add_one
from autopar.adapters.optimizer_step import own_step
from autopar.runtime.params.dtensor_layout import as_local, is_here, laid_out
from autopar.runtime.params.sharded_tensor import ShardedTensor, all_written

_ELEMENTWISE = {  # in torch.optim, by the module that defines `step`
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip
_COUNTS = {"step", "eta", "mu", "mu_product"}  # states without a value per element


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether its step is one of torch's that are known to be elementwise."""
    step = own_step(optimizer)
    return step.__module__.startswith("torch.optim.") and step.__qualname__.partition(".")[0] in _ELEMENTWISE


@contextmanager
def on_pieces(optimizer: Optimizer, is_ours: Callable[[Tensor], bool]) -> Iterator[None]:
    """Context manager: groups and states contain local shards in place of our parameters, besides other parameters.
    Changes of options are kept."""
    groups, states = optimizer.param_groups, optimizer.state
    found = [(p, p.grad) for group in groups for p in group["params"] if is_ours(p)]
    elsewhere = [p for p, gradient in found if gradient is not None and not is_here(p)]
    known = is_elementwise(optimizer)
    counted = {p for p in elsewhere if known and _only_counts(optimizer, states.get(p, {}))}
    pieces = {p: _piece(p, gradient) for p, gradient in found if gradient is not None and p not in counted}
    ours = list(pieces)
    made: Any = defaultdict(dict)
    for key, state in states.items():
        if not (isinstance(key, Tensor) and is_ours(key)):
            made[key] = state
        elif key in pieces:
            made[pieces[key]] = {n: over(Tensor, x, functools.partial(piece_of_state, key)) for n, x in state.items()}
    optimizer.param_groups = [
        {**g, "params": [pieces.get(p, p) for p in g["params"] if p in pieces or not is_ours(p)]} for g in groups
    ]
    optimizer.state = made
    try:
        yield
        add_one([states[p]["step"] for p in counted if "step" in states[p]])
        for p in counted:
            as_local(p).zero_()  # no elements, but bumps the version on all stages
    finally:
        for group, stepped in zip(groups, optimizer.param_groups, strict=True):
            group.update({name: value for name, value in stepped.items() if name != "params"})
        made = optimizer.state
        optimizer.param_groups, optimizer.state = groups, states
        for p in ours:
            if (after := made.pop(pieces[p], None)) is not None:
                before = states[p]
                before.update(_laid_out(p, after, before))
                for name in before.keys() - after.keys():
                    del before[name]
            if (local := as_local(p)).data_ptr() != pieces[p].data_ptr():  # the step has set .data
                local.copy_(pieces[p])
        states.update(made)
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


def over(kind: Any, value: Any, fn: Callable[[Any], Any]) -> Any:
    """A state with mapped members of a type (or of several), also in its lists, tuples, dicts and deques."""
    if isinstance(value, kind):
        return fn(value)
    if isinstance(value, dict):
        return {key: over(kind, x, fn) for key, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(over(kind, x, fn) for x in value)
    return deque((over(kind, x, fn) for x in value), value.maxlen) if isinstance(value, deque) else value


def piece_of_state(p: Any, x: Tensor, keep: bool = False) -> Any:
    """An unsharded state, such as one loaded from a file by ``load_state_dict``, is sharded like its parameter.
    ``keep``: as a ShardedTensor."""
    if x.shape == p.shape and p.cuts and not p.lies_as(x):
        piece = p.laid_as(x.detach(), "optimizer")
        return p.like(piece) if keep else piece
    return x if keep else as_local(x)


def _laid_out(p: nn.Parameter, made: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """States of a parameter as DTensors over local shards; states changed in place keep their object."""
    shape = as_local(p).shape
    changed = {n: x for n, x in made.items() if n not in before or as_local(before[n]) is not x}

    def laid(name: str, x: Tensor) -> Tensor:
        return laid_out(p, x) if x.shape == shape and (x.dim() or name not in _COUNTS) else x

    return {n: over(Tensor, x, functools.partial(laid, n)) for n, x in changed.items()}

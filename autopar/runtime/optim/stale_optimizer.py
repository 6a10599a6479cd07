"""An optimizer that was made before `parallelize` steps weights that no step on a mesh reads: refused at its step.

    note_parameters(model.parameters())      these are now pieces on a mesh, under other parameters

Gradients arrive at the parameters of the parallel model, so those of the old ones stay None, and torch's optimizers
pass over such parameters without a word. An optimizer whose parameters do have gradients trains the old model by
itself, which is nobody's mistake.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar.adapters.autograd import version_of

_PLACED = WeakIdKeyDictionary()  # -> their version when an optimizer last stepped them


def note_parameters(parameters: Iterable[Tensor]) -> None:
    """Parameters of a model that was put on a mesh. Optimizers are watched from the first call on."""
    for parameter in parameters:
        _PLACED.setdefault(parameter, -1)
    _watch()


@functools.cache
def _watch() -> Any:
    return register_optimizer_step_pre_hook(_refuse), register_optimizer_step_post_hook(_note)


def version_after_step(parameter: Tensor) -> int:
    """That of a parameter of such a model when an optimizer last stepped it; -1 if none has."""
    return int(_PLACED.get(parameter, -1))


def _note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not isinstance(p, DTensor) and p in _PLACED and p.grad is not None:  # no piece is among them
                _PLACED[p] = version_of(p)


def _refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        parameters = group["params"]
        if parameters and parameters[0] in _PLACED and all(p.grad is None for p in parameters):
            raise ValueError(
                f"optimizer: this {type(optimizer).__name__} was made of the model's parameters before parallelize, so "
                "it would step weights that no step on the mesh reads; make it of the parallel model's: "
                f"{type(optimizer).__name__}(parallel.parameters(), ...)"
            )

"""What scripts pass to `save_pretrained` beside a folder: arguments of transformers, for models that are in one piece.

    model.save_pretrained(folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save,
                          state_dict=accelerator.get_state_dict(model))

Rank 0 writes, files of safetensors, the weights that the model has. What asks for that is taken, the rest refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.ir.signature import ParameterSpec
from autopar.runtime.params.parameters import check_tensors, local_tensor, piece_like
from autopar.runtime.params.sharded_tensor import whole_tensor

_SAID = {"safe_serialization": True, "push_to_hub": False, "variant": None, "token": None}  # what holds anyway


def check_habits(how: Mapping[str, Any], own: Mapping[str, nn.Parameter], specs: tuple[ParameterSpec, ...]) -> None:
    """``own``: this rank's pieces by name. Raises ValueError for what would be another folder."""
    for name, value in how.items():
        if name == "is_main_process":
            continue  # rank 0 is
        if name == "save_function":
            _check_function(value)
        elif name == "state_dict":
            if value is not None:
                _check_weights(value, own, specs)
        elif name not in _SAID:
            raise ValueError(f"save_pretrained: of a model on a mesh knows no {name}, found {value!r}; leave it out")
        elif value != _SAID[name]:
            raise ValueError(
                f"save_pretrained: of a model on a mesh writes safetensors into a folder, found {name}={value!r}; "
                "leave it out, and do that with the folder"
            )


def _check_function(function: Any) -> None:
    home = str(getattr(function, "__module__", ""))
    if not home.startswith(("accelerate.", "torch.", "safetensors.")):
        raise ValueError(
            f"save_pretrained: rank 0 writes by itself, found save_function={function!r}; leave it out, and do that "
            "with the folder"
        )


def _check_weights(state: Mapping[str, Any], own: Mapping[str, nn.Parameter], specs: tuple[ParameterSpec, ...]) -> None:
    """Those that the model has. An empty one is that of a rank which does not write."""
    check_tensors(state)
    for spec in specs if state else ():
        name = next((n for n in (spec.name, *spec.aliases) if n in state), None)
        if name is not None and (spec.name not in own or _same(own[spec.name], state[name], spec)):
            continue
        raise ValueError(
            f"save_pretrained: writes the weights that the model has, found a state_dict with another {spec.name}, or "
            "none; leave it out, or load_state_dict(it) before"
        )


def _same(parameter: nn.Parameter, whole: Tensor, spec: ParameterSpec) -> bool:
    if tuple(whole.shape) != tuple(spec.shape):
        return False
    piece = local_tensor(parameter)
    given = piece_like(parameter, whole_tensor(whole))
    return torch.equal(piece, given.to(piece.device, piece.dtype))

"""Structure copies of modules and inputs whose tensors are fakes on the CPU: shapes without storage.

One `FakeTensorMode` serves a whole capture. The device is always the CPU, never meta: on meta, cross_entropy loses
gradients silently, and a CPU build of torch refuses fake CUDA tensors.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode


def new_mode() -> FakeTensorMode:
    """A fake mode that turns the real tensors which a model makes on the way into fakes, too."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A new fake of the same shape, strides, dtype and requires_grad, on the CPU. Never shared between two inputs:
    the exporter would specialise the graph to their being one tensor."""
    with mode:
        if tensor.is_contiguous():
            out = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")
        else:
            out = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(out, requires_grad=tensor.requires_grad)
    return out


def structure_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A deep copy in which each parameter and buffer is a fake; ties stay ties; no parameter is copied.

    Raises ValueError if the module holds something that cannot be copied.
    """
    memo: dict[int, Any] = {id(t): fake_like(t, mode) for t in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(
            f"capture: the module's structure must be copyable, found {error}; move what cannot be deep-copied "
            "(locks, handles, generators) out of the module"
        ) from error


def skeleton_of(model: nn.Module) -> nn.Module:
    """A deep copy without weights: parameters and buffers on the meta device, ties kept."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        meta = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
    return copy.deepcopy(model, memo)

"""Operators that are taken apart while they are captured, since their schemas hide that they write to a buffer.

instance_norm(x, w, b, running_mean, running_var, True, m, eps)   -->   the norm, and running_mean.copy_(...)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """x [N, C, ...]: each channel of each example by its own mean and variance, or all by the running ones, which are
    moved towards the mean over the examples of these. Half types are computed in float32."""
    shape = [1, x.shape[1]] + [1] * (x.dim() - 2)
    wide = x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)
    if use_input_stats or running_mean is None or running_var is None:
        dims, count = list(range(2, x.dim())), math.prod(x.shape[2:])
        mean = wide.mean(dims, keepdim=True)
        centred = wide - mean
        variance = (centred * centred).mean(dims, keepdim=True)
        if running_mean is not None and running_var is not None:
            _move(running_mean, mean, momentum)
            _move(running_var, variance * (count / max(count - 1, 1)), momentum)
    else:
        centred = wide - running_mean.reshape(shape)
        variance = running_var.reshape(shape)
    out = centred * torch.rsqrt(variance + eps)
    out = out if weight is None else out * weight.reshape(shape)
    out = out if bias is None else out + bias.reshape(shape)
    return out.to(x.dtype)


def _move(running: Tensor, found: Tensor, momentum: float) -> None:
    """(1 - momentum) * running + momentum * (mean over the examples)"""
    over_examples = found.detach().mean(0).reshape(running.shape)
    running.copy_((1.0 - momentum) * running + momentum * over_examples.to(running.dtype))


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {aten.instance_norm.default: instance_norm}

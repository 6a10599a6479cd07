"""Decompositions used while capturing, for operators that write to a buffer although their schema does not say so, and
for those whose own decomposition writes in place.

instance_norm(x, w, b, running_mean, running_var, True, m, eps)   -->   the norm, and running_mean.copy_(...)
lstm_cell(x, (h, c), w_ih, w_hh, b_ih, b_hh)                      -->   two linears, four gates, and so on
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
    """x [N, C, ...]: normalize each channel of each example by its own mean and variance, or all by the running
    statistics, which are updated with the averages over examples. Half types are computed in float32."""
    shape = [1, x.shape[1]] + [1] * (x.dim() - 2)
    wide = x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)
    if use_input_stats or running_mean is None or running_var is None:
        dims, count = list(range(2, x.dim())), math.prod(x.shape[2:])
        mean = wide.mean(dims, keepdim=True)
        centred = wide - mean
        variance = (centred * centred).mean(dims, keepdim=True)
        if running_mean is not None and running_var is not None:
            _update(running_mean, mean, momentum)
            _update(running_var, variance * (count / max(count - 1, 1)), momentum)
    else:
        centred = wide - running_mean.reshape(shape)
        variance = running_var.reshape(shape)
    out = centred * torch.rsqrt(variance + eps)
    out = out if weight is None else out * weight.reshape(shape)
    out = out if bias is None else out + bias.reshape(shape)
    return out.to(x.dtype)


def _update(running: Tensor, found: Tensor, momentum: float) -> None:
    """(1 - momentum) * running + momentum * (mean over the examples)"""
    over_examples = found.detach().mean(0).reshape(running.shape)
    running.copy_((1.0 - momentum) * running + momentum * over_examples.to(running.dtype))


Cell = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # w_ih, w_hh, b_ih, b_hh


def lstm_cell(x: Tensor, hx: list[Tensor], *weights: *Cell) -> tuple[Tensor, Tensor]:
    """x [N, I] or [I], h and c [N, H] -> h, c. The rows of the weights hold the gates input, forget, cell, output."""
    h, c = hx
    i, f, g, o = _gates(x, h, *weights).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru_cell(x: Tensor, h: Tensor, *weights: *Cell) -> Tensor:
    """As `lstm_cell`; gates: reset, update, new."""
    w_ih, w_hh, b_ih, b_hh = (*weights, None, None)[:4]
    r, z, n = torch.nn.functional.linear(x, w_ih, b_ih).chunk(3, -1)
    rh, zh, nh = torch.nn.functional.linear(h, w_hh, b_hh).chunk(3, -1)
    new = torch.tanh(n + torch.sigmoid(r + rh) * nh)
    return new + torch.sigmoid(z + zh) * (h - new)


def _gates(
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    return torch.nn.functional.linear(x, w_ih, b_ih) + torch.nn.functional.linear(h, w_hh, b_hh)


def fill_diagonal_(x: Tensor, value: float, wrap: bool = False) -> Tensor:
    """Fill the diagonal in place, by a mask. torch's own decomposition writes through as_strided, which becomes
    as_strided_scatter, whose derivative in torch is wrong."""
    place = torch.arange(x.shape[0], device=x.device).view(-1, *[1] * (x.dim() - 1))
    if wrap and x.dim() == 2:  # in a tall matrix the diagonal begins again, below an empty row
        place = place % (x.shape[1] + 1)
    on = torch.ones((), dtype=torch.bool, device=x.device)
    for dim in range(1, x.dim()):
        shape = [-1 if d == dim else 1 for d in range(x.dim())]
        on = on & (place == torch.arange(x.shape[dim], device=x.device).view(shape))
    return x.masked_fill_(on, value)


def as_strided_scatter(
    x: Tensor, source: Tensor, size: list[int], stride: list[int], offset: int | None = None
) -> Tensor:
    """For a contiguous x, as a scatter by flat index."""
    places = torch.arange(x.numel(), device=x.device).as_strided(size, stride, offset or 0).reshape(-1)
    return x.reshape(-1).scatter(0, places, source.reshape(-1)).view(x.shape)


def copy_of(view: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of a view, as `torch.view_copy` makes it."""
    return lambda *args, **how: view(*args, **how).clone(memory_format=torch.contiguous_format)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.instance_norm.default: instance_norm,
    aten.lstm_cell.default: lstm_cell,
    aten.gru_cell.default: gru_cell,
    aten.fill_diagonal_.default: fill_diagonal_,
    aten.as_strided_scatter.default: as_strided_scatter,
    aten.rnn_tanh_cell.default: lambda *cell: torch.tanh(_gates(*cell)),
    aten.rnn_relu_cell.default: lambda *cell: torch.relu(_gates(*cell)),
    aten.view_copy.default: copy_of(aten.reshape.default),
    aten.expand_copy.default: copy_of(aten.expand.default),
    aten.narrow_copy.default: copy_of(aten.narrow.default),
    aten.squeeze_copy.default: copy_of(aten.squeeze.default),
    aten.squeeze_copy.dim: copy_of(aten.squeeze.dim),
    aten.squeeze_copy.dims: copy_of(aten.squeeze.dims),
    aten.split_with_sizes_copy.default: lambda *args: [part.clone() for part in aten.split_with_sizes.default(*args)],
}

"""`autopar::extend`: the keys (or values) of earlier token slices, followed by those of this one.

A concatenation, as a separate operator so that `differentiate` can recognize it: F does not save the result, B
recomputes it from its two operands. So a step saves each token's keys once, and not once per later slice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.declare import operator


@operator("(Tensor past, Tensor own, int dim) -> Tensor")
def extend(past: Tensor, own: Tensor, dim: int) -> Tensor:
    """past [.., c, ..], own [.., l, ..] -> [.., c + l, ..] along ``dim``. c may be 0."""
    return torch.cat([past, own], dim)


@extend.register_fake
def _(past: Tensor, own: Tensor, dim: int) -> Tensor:
    shape = list(own.shape)
    shape[dim] = past.shape[dim] + own.shape[dim]
    return own.new_empty(shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    past, own, ctx.dim = inputs
    ctx.sizes = past.shape[ctx.dim], own.shape[ctx.dim]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    past, own = ctx.sizes
    parts = grad.narrow(ctx.dim, 0, past), grad.narrow(ctx.dim, past, own)
    return parts[0].contiguous(), parts[1].contiguous(), None


extend.register_autograd(_backward, setup_context=_setup)

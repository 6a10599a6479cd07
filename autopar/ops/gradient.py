"""`autopar::with_gradient_of`: the value of one tensor, the gradient of another.

    out = with_gradient_of(y, e)          out = y;   de = d(out), and y gets none

What computes e is dead code in a step graph: only its backward is left (`passes.simplify_views`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("autopar::with_gradient_of", mutates_args=())
def with_gradient_of(value: Tensor, source: Tensor) -> Tensor:
    """value and source of one shape and dtype -> value."""
    return value.clone()


@with_gradient_of.register_fake
def _(value: Tensor, source: Tensor) -> Tensor:
    assert value.shape == source.shape, f"with_gradient_of: {value.shape} and {source.shape}"
    return torch.empty_like(value)


def _backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
    return None, grad


with_gradient_of.register_autograd(_backward)

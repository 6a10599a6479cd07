"""Experts of transformers' registry with a capacity, in one process and without autopar's operators, as the reference
of `autopar.verify`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autopar.adapters.module_calls import forward_of


@contextlib.contextmanager
def capped_experts(model: nn.Module, capacity: float) -> Iterator[None]:
    """Context manager: an expert takes the first ``capacity`` times its even share of (token, expert) pairs; the
    weights of others are 0. Raises ValueError for experts outside of the registry."""
    found: list[Any] = [m for m in model.modules() if hasattr(m, "is_concatenated")] if capacity else []
    if capacity and not found:
        raise ValueError(
            f"capacity_factor: one process needs experts of transformers' registry, found none in "
            f"{type(model).__name__}; leave capacity_factor out"
        )
    with contextlib.ExitStack() as stack:
        for experts in found:
            stack.enter_context(forward_of(experts, _capped(experts, experts.forward, capacity)))
        yield


def _capped(experts: Any, forward: Any, capacity: float) -> Any:
    def limited(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        limit = math.ceil(capacity * index.numel() / experts.num_experts)
        kept = torch.zeros_like(index, dtype=torch.bool)
        for number in range(experts.num_experts):
            chosen = (index == number).flatten()
            kept |= (chosen & (chosen.cumsum(0) <= limit)).view(index.shape)
        out: Tensor = forward(x, index, weights * kept)
        return out

    return limited

"""Tensors that have a gradient in torch and none here: whoever asks for it is told why."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def with_refusal(words: str, tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """The same values; a backward through them raises ValueError with these words."""
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True, device=device)
        return list(_RefusedGradient.apply(words, anchor, *tensors))


class _RefusedGradient(torch.autograd.Function):
    """Outputs that would have a gradient in torch, with words where it is asked for."""

    @staticmethod
    def forward(ctx: Any, words: str, anchor: Tensor, *outputs: Tensor) -> Any:
        ctx.words = words
        return tuple(x.detach() for x in outputs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ValueError(ctx.words)

"""Products of experts as a GPU makes them, here on the CPU: the host never asks where an expert's rows end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.ops import moe

ops = torch.ops.autopar
ENDS = ([4, 4, 12, 16], [0, 0, 0, 16], [0, 0, 0, 0], [3, 7, 8, 11])  # experts without rows, rows of no expert


def numbers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(0)).bfloat16()  # sums are exact


def made(ends: list[int]) -> list[Tensor]:
    offsets = torch.tensor(ends, dtype=torch.int32)
    rows, grad, bias = numbers(16, 8), numbers(16, 24), numbers(4, 8)
    return [
        ops.grouped_mm(rows, numbers(4, 24, 8), offsets, False),
        ops.grouped_mm(rows, numbers(4, 8, 24), offsets, True),
        ops.grouped_mm_weight_grad(grad, rows, offsets, False),
        ops.grouped_mm_weight_grad(grad, rows, offsets, True),
        ops.grouped_bias(rows, bias, offsets),
        ops.grouped_sum(rows, offsets),
    ]


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_the_same_numbers(ends: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = made(ends)
    monkeypatch.setattr(moe, "_fused", lambda left, right: True)
    monkeypatch.setattr(moe, "_stay", lambda rows: True)
    monkeypatch.setattr(moe, "_groups", None)  # would ask
    for found, other in zip(made(ends), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=0, atol=0)

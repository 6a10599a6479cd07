"""Products of experts as a GPU makes them, here on the CPU: the host never asks where an expert's rows end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ops import grouped_experts
from autopar.ops.grouped_experts import Tiles

ops = torch.ops.autopar
ENDS = ([4, 4, 12, 16], [0, 0, 0, 16], [0, 0, 0, 0], [3, 7, 8, 11])  # experts without rows, rows of no expert


def numbers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(0)).bfloat16()  # sums are exact


def made(ends: list[int], rows: int = 16) -> list[Tensor]:
    offsets = torch.tensor(ends, dtype=torch.int32)
    given, grad, bias = numbers(rows, 8), numbers(rows, 24), numbers(len(ends), 8)
    return [
        ops.grouped_mm(given, numbers(len(ends), 24, 8), offsets, False),
        ops.grouped_mm(given, numbers(len(ends), 8, 24), offsets, True),
        ops.grouped_mm_weight_grad(grad, given, offsets, False),
        ops.grouped_mm_weight_grad(grad, given, offsets, True),
        ops.grouped_bias(given, bias, offsets),
        ops.grouped_sum(given, offsets),
    ]


def compare(expected: list[Tensor], fused: bool, monkeypatch: pytest.MonkeyPatch, *given: Any) -> None:
    monkeypatch.setattr(grouped_experts, "_fused", lambda left, right: fused)
    monkeypatch.setattr(grouped_experts, "_stay", lambda rows: True)
    monkeypatch.setattr(grouped_experts, "_groups", None)  # would ask
    for found, other in zip(made(*given), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=0, atol=0)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_the_same_numbers(ends: list[int], fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(made(ends), fused, monkeypatch, ends)


@pytest.mark.parametrize("height", [1, 3, 16])
def test_rows_on_tiles(height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the rows are split on experts, they fit."""
    monkeypatch.setattr(grouped_experts, "LEAST", height)
    for seed in range(20):
        split = torch.rand(5, generator=torch.Generator().manual_seed(seed)) ** 4
        ends = (split.cumsum(0) / split.sum() * 37).int().tolist()
        with monkeypatch.context() as patch:
            compare(made(ends, 41), False, patch, ends, 41)


def test_no_rows() -> None:
    none = Tiles(torch.zeros(3, dtype=torch.int32), 0)
    assert none.product(torch.zeros(0, 4), torch.ones(3, 4, 6)).shape == (0, 6)
    assert not none.outer(torch.zeros(0, 4), torch.zeros(0, 6)).any()

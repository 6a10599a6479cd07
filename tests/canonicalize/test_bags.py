"""Bags of embeddings: those of one length are lookups and a reduction; others are left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.canonicalize.test_normalize import normalized, rand, text

BAGS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "max": {"mode": "max"},
    "mean without padding": {"mode": "mean", "padding_idx": 3},
    "max without padding": {"mode": "max", "padding_idx": 3},
}


@pytest.mark.parametrize("how", BAGS)
def test_bags_of_one_length(how: str) -> None:
    ids = torch.randint(0, 6, (4, 3), generator=torch.Generator().manual_seed(0))
    ids[1] = 3  # a bag of padding alone
    gm = normalized(lambda ids, w: F.embedding_bag(ids, w, **BAGS[how]), {"ids": ids}, w=rand(6, 8, grad=True))
    assert any(line.startswith("embedding(") for line in text(gm))
    assert not any(line.startswith("embedding_bag") for line in text(gm))


def test_bags_with_weights() -> None:
    ids = torch.randint(0, 6, (4, 3), generator=torch.Generator().manual_seed(0))
    inputs = {"ids": ids, "s": rand(4, 3, grad=True)}
    normalized(lambda ids, s, w: F.embedding_bag(ids, w, mode="sum", per_sample_weights=s), inputs, w=rand(6, 8))


def test_bags_of_other_lengths_are_left() -> None:
    ids = torch.tensor([0, 2, 4, 4, 1])

    def bags(ids: Tensor, w: Tensor) -> Tensor:
        return F.embedding_bag(ids, w, torch.tensor([0, 2]))

    def scaled(ids: Tensor, w: Tensor) -> Tensor:
        return F.embedding_bag(ids.view(1, -1), w, mode="sum", scale_grad_by_freq=True)

    for function in (bags, scaled):
        gm = normalized(function, {"ids": ids}, w=rand(6, 8, grad=True))
        assert any(line.startswith("embedding_bag") for line in text(gm))

"""Weights without a gradient, on every axis: whole is whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.testing.harness import check_model


class Scaled(nn.Module):
    """DoRA: a frozen weight is used on the batch, and whole for the length of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(8, 16, bias=False), nn.Linear(8, 4, bias=False), nn.Linear(4, 16)
        self.length, self.head = nn.Parameter(torch.rand(16) + 1), nn.Linear(16, 8)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.base(x)
        scale = self.length / self.base.weight.norm(p=2, dim=1)
        h = h + (scale - 1) * F.linear(x, self.base.weight) + scale * self.b(self.a(x))
        return F.mse_loss(self.head(torch.relu(h)), target)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_frozen_weight_on_the_batch_and_whole(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, draw = Scaled().double(), torch.randn(8, 2, 8, dtype=torch.float64)
    options = Options(zero=3) if "dp" in mesh else Options()
    assert check_model(model, {"x": draw[:, 0], "target": draw[:, 1]}, Mesh.of(**mesh), options).worst < 1e-10

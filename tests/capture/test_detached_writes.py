"""Writes to tensors that share memory with detached ones: values and gradients are those of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.mesh import Mesh
from autopar.testing.harness import check_model

Written = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, written: Written) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.written, self.linear, self.words = written, nn.Linear(4, 4), nn.Embedding(5, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, ids: Tensor) -> Tensor:
        e = self.words(ids)
        return self.written(self, self.linear(e), e)


def of_positions(self: Model, h: Tensor, e: Tensor) -> Tensor:
    with torch.no_grad():
        positions = h.cumsum(0).view(-1, 4).detach()
    positions += e
    return (h * positions).sum()


def alone(self: Model, h: Tensor, e: Tensor) -> Tensor:
    y = h.detach()
    y.add_(e)
    return (y * y).sum()


def part_of_a_view(self: Model, h: Tensor, e: Tensor) -> Tensor:
    y = h.detach().view(-1)
    y[:4].add_(e[0])
    z = y * 2
    z[3:] *= e[1, 0]
    return (z * y).sum()


def with_the_value_behind(self: Model, h: Tensor, e: Tensor) -> Tensor:
    before, row, y = h.sum(), h[1], h.data
    y.mul_(e)
    y[1] = e[0]
    return before + (h * e).sum() + (row * y).sum()


def without_gradient(self: Model, h: Tensor, e: Tensor) -> Tensor:
    before = h.sum()
    with torch.no_grad():
        h.mul_(2).clamp_(-0.5, 0.5)
        h.view(-1)[3:].neg_()
    return before + (h * h).sum()


def twice_detached(self: Model, h: Tensor, e: Tensor) -> Tensor:
    y = h.detach()
    y += e
    z = y[1:].detach()
    z *= e[1:]
    return (y * z.sum()).sum() + h.sum() ** 2


def of_a_buffer(self: Model, h: Tensor, e: Tensor) -> Tensor:
    seen = self.count.detach()
    seen += h.sum(0)
    return (h * seen).sum() + (e * self.count).sum()


CASES: tuple[Written, ...] = (
    of_positions,
    alone,
    part_of_a_view,
    with_the_value_behind,
    without_gradient,
    twice_detached,
    of_a_buffer,
)


@pytest.mark.parametrize("written", CASES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", [{"dp": 1}, {"tp": 2}], ids=str)
def test_written(written: Written, sizes: dict[str, int]) -> None:
    batch: dict[str, Any] = {"ids": torch.tensor([0, 3, 1, 4])}
    assert check_model(Model(written).double(), batch, Mesh.of(**sizes)).worst < 1e-12

"""What is captured as it is, is captured with float32 islands lifted, too; and the numbers are one process's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.front_end import capture
from autopar.ir.mesh import Mesh
from autopar.testing.harness import check_model


class Kept(nn.Module):
    """A float64 layer beside something that is kept in float32."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()
        torch.manual_seed(0)
        self.keep(torch.rand(4) + 0.5)

    def keep(self, value: Tensor) -> None:
        self.register_buffer("table", value)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.table).square().mean()


class PlainAttribute(Kept):
    def keep(self, value: Tensor) -> None:
        self.table = value

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.table.type_as(x).detach().clone()).square().mean()


class NotPersistent(Kept):
    def keep(self, value: Tensor) -> None:
        self.register_buffer("table", value, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.table.to(x.dtype)).square().mean()


class Running(Kept):
    """The buffer is moved by each step."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        with torch.no_grad():
            self.table.mul_(0.9).add_(h.mean(0).to(self.table.dtype), alpha=0.1)
        return h.square().mean()


class OwnTensor(Kept):
    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])).float().square().mean()


class Indexed(Kept):
    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layer(x), self.table[torch.arange(4)].expand(x.shape).to(x))


KINDS = [Kept, PlainAttribute, NotPersistent, Running, OwnTensor, Indexed]


@pytest.mark.parametrize("kind", KINDS)
def test_a_float32_tensor_beside_a_float64_model(kind: type[Kept]) -> None:
    batch: dict[str, Any] = {"x": torch.randn(4, 4, dtype=torch.float64)}
    capture(kind(), batch)
    assert check_model(kind(), batch, Mesh.of(dp=2)).worst < 1e-10

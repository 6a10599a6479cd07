"""Operators over space, and sums into rows, within models: what their rules are for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.testing.harness import check_model


class Small(nn.Module):
    def __init__(self, forward: Callable[[nn.ModuleList, Tensor], Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.way, self.parts = forward, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.parts, x).square().mean()


def normed(m: nn.ModuleList, x: Tensor) -> Tensor:
    return m[2](F.silu(m[1](m[0](x))))


def one_example(m: nn.ModuleList, x: Tensor) -> Tensor:
    return m[1](F.relu(m[0](x[0])))


def summed(m: nn.ModuleList, x: Tensor) -> Tensor:
    return torch.zeros(4, 8, dtype=x.dtype).index_add(0, torch.tensor([0, 1, 0, 3]), m[0](x))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, int]]] = {
    "groups that do not divide": (
        lambda: Small(normed, nn.Conv2d(3, 12, 3), nn.GroupNorm(3, 12), nn.Conv2d(12, 4, 1)),
        (4, 3, 6, 6),
        {"dp": 2, "tp": 2},
    ),
    "groups that do": (
        lambda: Small(normed, nn.Conv2d(3, 12, 3), nn.GroupNorm(6, 12), nn.Conv2d(12, 4, 1)),
        (4, 3, 6, 6),
        {"dp": 2, "tp": 2},
    ),
    "transposed, groups and a bias": (
        lambda: Small(one_example, nn.ConvTranspose2d(4, 8, 3, 2, groups=2), nn.ConvTranspose2d(8, 4, 2)),
        (1, 2, 4, 5, 5),
        {"tp": 2},
    ),
    "one example, and a bias behind a cut contraction": (
        lambda: Small(one_example, nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(8, 4, 2)),
        (1, 4, 5, 5),
        {"tp": 2},
    ),
    "rows that are added to zeros": (lambda: Small(summed, nn.Linear(6, 8)), (4, 6), {"dp": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_same_numbers(name: str) -> None:
    torch.manual_seed(0)
    build, shape, sizes = CASES[name]
    options = Options(zero=3) if "dp" in sizes else Options()
    made = check_model(build().double(), {"x": torch.randn(shape).double()}, Mesh.of(**sizes), options)
    assert made.worst < 1e-10
    norm = made.compiled.plan.parameters.get("parts.1.weight", {}).get("tp")
    if name.startswith("groups") and norm is not None:
        assert (str(norm.stored) == "S(0)") == (name == "groups that do")

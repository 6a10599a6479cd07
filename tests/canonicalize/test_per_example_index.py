"""Rows that each example picks for itself do not make examples meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.testing.harness import check_model
from tests.canonicalize.test_normalize import normalized, rand, text

G = torch.Generator().manual_seed(0)
ONE, TWO = torch.randint(6, (4,), generator=G), torch.randint(6, (4, 3), generator=G)
B = torch.arange(4)

PICKED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "one row each": lambda x, i, j: x[torch.arange(4), i],
    "of the batch's size": lambda x, i, j: x[torch.arange(x.shape[0], device=x.device), i.to(torch.int)],
    "rows from the end": lambda x, i, j: x[torch.arange(4), i - 6],
    "three rows each": lambda x, i, j: x[torch.arange(4)[:, None], j],
    "the same rows of each": lambda x, i, j: x[torch.arange(4)[:, None], torch.tensor([1, 1, 5])],
    "one entry each": lambda x, i, j: x[torch.arange(4), i, i % 5],
    "three entries each": lambda x, i, j: x[torch.arange(4)[:, None], j, j % 5],
}
LEFT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "another order": lambda x, i, j: x[torch.arange(4).flip(0), i],
    "an index of the inputs": lambda x, i, j: x[i % 4, i],
    "examples in the second dim": lambda x, i, j: x[torch.arange(4), torch.stack([i, i])],
    "the last dim": lambda x, i, j: x[:, i, i % 5],
}


@pytest.mark.parametrize("name", [*PICKED, *LEFT])
def test_is_a_gather_of_each_example(name: str) -> None:
    inputs = {"x": rand(4, 6, 5, grad=True), "i": ONE, "j": TWO}
    lines = text(normalized({**PICKED, **LEFT}[name], inputs))
    assert any(line.startswith("gather(") for line in lines) == (name in PICKED)


def written(x: Tensor, index: tuple[Any, ...], y: Tensor, accumulate: bool = False) -> Tensor:
    return x.clone().index_put(index, y, accumulate)


DISTINCT = torch.tensor([[0, 3, 5], [4, 1, 2], [1, 0, 3], [5, 4, 0]])
WRITTEN: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "one row each": lambda x, i, y: written(x, (torch.arange(4), i[:, 0]), y[:, 0]),
    "three rows each": lambda x, i, y: written(x, (torch.arange(4)[:, None], i), y),
    "one value for all": lambda x, i, y: written(x, (torch.arange(4)[:, None], i - 6), y[0, 0, 0]),
    "rows that are added": lambda x, i, y: written(x, (torch.arange(4)[:, None], i % 2), y, True),
    "entries": lambda x, i, y: written(x, (torch.arange(4)[:, None], i, i % 5), y[..., 0]),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_is_a_scatter_into_each_example(name: str) -> None:
    inputs = {"x": rand(4, 6, 5, grad=True), "i": DISTINCT, "y": rand(4, 3, 5, seed=1, grad=True)}
    lines = text(normalized(WRITTEN[name], inputs))
    assert any(line.startswith("scatter") for line in lines) and not any("index_put" in line for line in lines)


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(6, 5), nn.Linear(5, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, i: Tensor, target: Tensor) -> Tensor:
        h = self.head(torch.relu(self.up(self.embed(ids))))
        h = h.index_put((torch.arange(h.shape[0]), (i + 1) % 6), h[:, 0])
        return F.mse_loss(h[torch.arange(h.shape[0]), i] + h.mean(1), target)


CUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2, "tp": 2}, {"zero": 3}),
    ({"dp": 2}, {"microbatches": 2}),
    ({"tp": 2}, {}),
]


@pytest.mark.parametrize("mesh, options", CUTS, ids=str)
def test_same_numbers(mesh: dict[str, int], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    batch = {"ids": torch.randint(6, (4, 6)), "i": ONE, "target": torch.randn(4, 8).double()}
    assert check_model(Ends().double(), batch, Mesh.of(**mesh), Options(**options)).worst < 1e-10

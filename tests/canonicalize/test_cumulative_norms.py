"""Batch norms whose running statistics are means over all batches (``momentum=None``)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.support.ranks import run_ranks

STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.norm(self.conv(x)).mean(-1)) ** 2).mean()


def trained(sizes: dict[str, int], options: dict[str, Any]) -> tuple[float, float]:
    """How far losses, and all parameters and buffers after three steps, are from those of one process."""
    model = Net().double()
    alone = copy.deepcopy(model)
    batches = [torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(i)).double() for i in range(STEPS)]
    expected = steps(alone, lambda x: alone(x), batches)
    mesh = autopar.init_mesh("cpu", **sizes)
    at, parts = autopar.dp_rank_and_size(mesh)
    mine = [x.chunk(parts)[at] for x in batches]
    parallel = autopar.parallelize(model, mesh, example_batch={"x": mine[0]}, **options)
    found = steps(parallel, lambda x: parallel(x=x), mine)
    state = parallel.full_state_dict()
    wrong = [float((state[name] - x).abs().max()) for name, x in alone.state_dict().items()]
    return max(abs(a - b) for a, b in zip(found, expected, strict=True)), max(wrong)


def steps(model: nn.Module, forward: Any, batches: list[Tensor]) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x in batches:
        optimizer.zero_grad()
        loss = forward(x)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(("sizes", "options"), [({"dp": 2}, {"zero": 3}), ({"tp": 2}, {})])
def test_equals_one_process(sizes: dict[str, int], options: dict[str, Any]) -> None:
    for losses, state in run_ranks(2, trained, sizes, options):
        assert losses < 1e-12 and state < 1e-12

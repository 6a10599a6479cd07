"""A forward may ask for values of small buffers that nothing writes: they become part of the graph, under a guard."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture.front_end import capture
from autopar.ir.mesh import Mesh
from autopar.testing.harness import check_model
from tests.support.ranks import run_ranks


class Asking(nn.Module):
    """A branch on one entry, and a size that follows from numbers in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("prob", torch.tensor([0.5, 1.0]))
        self.register_buffer("stride", torch.tensor(3), persistent=False)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.count += 1
        if self.prob[0] < 1:
            y = y * 2
        missing = (torch.ceil((x.shape[-1] - self.stride + 1) / self.stride) + 1) * self.stride - x.shape[-1]
        if missing.to(torch.int64) <= 100:
            y = F.pad(y, (0, missing.to(torch.int64)), value=1.0)
        return y.square().mean()


def test_values_of_buffers_are_known_and_exact_on_meshes() -> None:
    model, batch = Asking().double(), {"x": torch.randn(4, 8, dtype=torch.float64)}
    values = dict(capture(model, batch).meta["signature"].values)
    assert values.keys() == {"prob", "stride"} and values["stride"] == "torch.int640300000000000000"
    assert check_model(model, batch, Mesh.of(dp=2, tp=2)).worst < 1e-10


class Written(Asking):
    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        self.prob.mul_(0.5)
        return made


class Assigned(Asking):
    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        self.prob = self.prob * 0.5
        return made


class Large(Asking):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("prob", torch.full((100,), 0.5))


@pytest.mark.parametrize("kind", [Written, Assigned, Large])
def test_a_branch_on_a_buffer_that_changes_or_is_large_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)if self.prob\[0\] < 1.*reads the value of a tensor"):
        capture(kind(), {"x": torch.randn(4, 8)})


def _losses(rank: int = 0) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    model, x = Asking().double(), torch.ones(2, 8, dtype=torch.float64)
    twin = Asking().double()
    twin.load_state_dict(model.state_dict())
    parallel = autopar.parallelize(model, autopar.init_mesh("cpu", 60.0, tp=2), example_batch={"x": x})
    found = []
    for prob in (0.5, 0.5, 2.0, 0.5, math.nan):
        for held in (parallel, twin):
            held.prob[0] = prob
        found.append((float(parallel.train_step(x=x)), float(twin(x))))
    loaded = {**parallel.full_state_dict(), "prob": torch.tensor([3.0, 3.0], dtype=torch.float64)}
    parallel.load_state_dict(loaded)
    twin.prob.fill_(3.0)
    return [*found, (float(parallel.train_step(x=x)), float(twin(x)))]


def test_a_step_is_compiled_again_when_the_value_changes() -> None:
    for said in run_ranks(2, _losses):
        assert all(abs(a - b) < 1e-12 for a, b in said) and len({round(b, 6) for _, b in said}) == 2

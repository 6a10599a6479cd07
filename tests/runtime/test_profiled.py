"""Names of actions and modules in torch's profiler, and none of the cost without it."""

from __future__ import annotations

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import autopar
from tests.support.ranks import run_ranks


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


def _profiled() -> list[str]:
    mesh = autopar.init_mesh("cpu", 60.0, pp=2)
    batch = {"x": torch.ones(4, 8)}
    model = autopar.parallelize(
        Chain(), mesh, example_batch=batch, microbatches=2, schedule="1f1b", batch_dims={"x": 0}
    )
    model.train_step(**batch)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        model.train_step(**batch)
    return [e.key for e in found.key_averages() if e.key.startswith(("autopar ", "layers"))]


def test_actions_have_names_in_the_profile() -> None:
    first, last = run_ranks(2, _profiled, timeout=120.0)
    assert {"autopar 0F0", "autopar 0F1"} <= set(first) and {"autopar 1F0", "autopar 1F1"} <= set(last)
    assert any(name.startswith("autopar 1B") for name in last)
    modules = [{name for name in names if name.startswith("layers.")} for names in (first, last)]
    assert modules == [{"layers.0", "layers.1"}, {"layers.2", "layers.3"}]

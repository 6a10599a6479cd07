"""What is changed between steps of a pipeline, on parameters that only some ranks hold: all ranks hear of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from tests.support.ranks import run_ranks

STEPS = 5


class Net(nn.Module):
    """Four layers, two on each stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.double()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(x, target)


def frozen_and_freed(model: Any, step: int) -> None:
    if step in (1, 3):
        model.layers[0].requires_grad_(step == 3)


def frozen_on_both(model: Any, step: int) -> None:
    if step == 1:
        model.layers[0].requires_grad_(False)
        model.layers[3].weight.requires_grad_(False) if hasattr(model.layers[3], "weight") else None
    if step == 2:
        model.layers[3].requires_grad_(True)


def without_a_layer(model: Any, step: int) -> None:
    if step == 2:
        model.layers[1] = nn.Identity()


def with_a_hook(model: Any, step: int) -> None:
    if step == 2:
        model.layers[2].register_forward_hook(lambda module, given, out: out * 2)


CHANGES: list[Callable[[Any, int], None]] = [frozen_and_freed, frozen_on_both, without_a_layer, with_a_hook]


def batch(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {name: torch.randn(4, 4, generator=g, dtype=torch.float64) for name in ("x", "target")}


def losses(
    model: Any, change: Callable[[Any, int], None], step_of: Callable[[dict[str, Tensor]], Tensor]
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        change(model, step)
        found.append(float(step_of(batch(step))))
        optimizer.step()
        optimizer.zero_grad()
    return found


def worst_of_all() -> dict[str, float]:
    """On a rank: the largest difference of losses from plain torch, by change."""
    mesh, out = autopar.init_mesh("cpu", 30.0, pp=2), {}
    warnings.simplefilter("ignore")
    for change in CHANGES:
        plain = Net()

        def backward(given: dict[str, Tensor], plain: Net = plain) -> Tensor:
            loss: Tensor = plain(**given)
            loss.backward()
            return loss.detach()

        options: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2}
        parallel = autopar.parallelize(copy.deepcopy(plain), mesh, example_batch=batch(0), **options)
        found = losses(parallel, change, lambda given, p=parallel: p.train_step(**given))  # type: ignore[misc]
        out[change.__name__] = max(abs(a - b) for a, b in zip(found, losses(plain, change, backward)))
    return out


def test_changes_between_steps_reach_all_ranks() -> None:
    for found in run_ranks(2, worst_of_all, timeout=200):
        assert max(found.values()) < 1e-12, found

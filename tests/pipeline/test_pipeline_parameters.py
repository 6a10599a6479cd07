"""Parameters on pipelines: every rank has all of the model, and whatever is written over them is as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.adapters.dtensor import local_of
from autopar.runtime.params.dtensor_layout import is_here
from tests.support.ranks import run_ranks

STEPS = 3


class Net(nn.Module):
    """Ends that are tied over all stages, a number, a frozen layer, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(12, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen, self.unused = nn.Linear(6, 6).requires_grad_(False), nn.Linear(2, 2)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.table.weight
        self.double()

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        h = self.table(tokens)
        for layer in self.layers:
            h = torch.tanh(layer(h)) + h
        return nn.functional.cross_entropy(self.head(self.frozen(h) * self.scale).flatten(0, 1), target.flatten())


def batch(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {name: torch.randint(0, 12, (8, 5), generator=g) for name in ("tokens", "target")}


# --- what is done between the backward and the optimizer's step; it gives numbers ------------------------------


def by_hand(model: Any) -> list[float]:
    """Clipping, a penalty and counts."""
    penalty = 0.1 * sum(p.square().sum() for p in model.parameters())
    penalty.backward()
    total = sum(p.grad.norm() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.1 / float(total))
    without = [float(p.grad is None) for p in model.parameters()]
    return [float(penalty.detach()), float(total), sum(p.numel() for p in model.parameters()), *without]


def by_torch(model: Any) -> list[float]:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    return [*map(float, (nn.utils.clip_grad_norm_(model.parameters(), 0.1), flat.norm(), grads[0].std()))]


def across_stages(model: Any) -> list[float]:
    """Weights of different stages together; writes into views; draws."""
    first, last = model.layers[0].weight, model.layers[3].weight
    apart = (first - last).square().sum()
    apart.backward()
    with torch.no_grad():
        last[0] = first[1]
        last.t()[2].mul_(2)
        first.lerp_(last, 0.1)
        torch.manual_seed(0)
        nn.init.normal_(model.layers[2].bias)
        model.table.weight[model.table.weight.abs() < 0.1] = 0
    return [float(apart.detach()), float((first @ last).trace().detach()), first.detach().tolist()[0][1]]


def frozen_in_turns(model: Any) -> list[float]:
    """Other layers are trained in the next step."""
    for layer in (model.layers[0], model.layers[3]):
        layer.requires_grad_(not layer.weight.requires_grad)
    return [float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None]


WAYS: list[Callable[[Any], list[float]]] = [by_hand, by_torch, across_stages, frozen_in_turns]


def trained(model: Any, way: Callable[[Any], list[float]], step_of: Callable[[dict[str, Tensor]], Tensor]) -> Any:
    """(numbers, states of the optimizer by parameter and name), of a few steps with hooks that read numbers."""
    hooked = [p for p in model.parameters() if p.requires_grad][:3]
    handles = [p.register_hook(lambda g: g / (1 + g.norm())) for p in hooked]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    numbers = []
    for step in range(STEPS):
        numbers += [float(step_of(batch(step)).detach()), *way(model)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
    for handle in handles:
        handle.remove()
    states = [sorted(optimizer.state.get(p, {}).items()) for p in model.parameters()]
    return numbers, [(i, n, float(x.double().norm())) for i, state in enumerate(states) for n, x in state]


def worst(sizes: dict[str, int], options: dict[str, Any]) -> dict[str, float]:
    """The largest difference from one process, by way."""
    mesh, out = autopar.init_mesh("cpu", 30.0, **sizes), {}
    part, parts = autopar.dp_rank_and_size(mesh)

    def mine(step: int) -> dict[str, Tensor]:
        return {name: x.chunk(parts)[part] for name, x in batch(step).items()}

    for way in WAYS:
        plain = Net()
        parallel: Any = autopar.parallelize(copy.deepcopy(plain), mesh, example_batch=mine(0), **options)
        assert [n for n, _ in parallel.named_parameters()] == [n for n, _ in plain.named_parameters()]
        elsewhere = [p for p in parallel.parameters() if not is_here(p)]
        assert elsewhere and all(local_of(p).numel() == 0 for p in elsewhere)

        def backward(given: dict[str, Tensor], plain: Net = plain) -> Tensor:
            loss: Tensor = plain(**given)
            loss.backward()
            return loss

        numbers, states = trained(plain, way, backward)
        ours, of_ours = trained(parallel, way, lambda given, p=parallel: p.train_step(**{  # type: ignore[misc]
            name: x.chunk(parts)[part] for name, x in given.items()}))  # fmt: skip
        assert [s[:2] for s in of_ours] == [s[:2] for s in states]
        whole = parallel.full_state_dict()
        out[way.__name__] = max(
            *(abs(a - b) for a, b in zip(ours, numbers, strict=True)),
            *(abs(a[2] - b[2]) for a, b in zip(of_ours, states, strict=True)),
            *(float((whole[n] - x).abs().max()) for n, x in plain.state_dict().items()),
        )
    return out


TWO = {"microbatches": 2}


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"pp": 2}, {**TWO, "schedule": "interleaved"}),
        ({"pp": 2, "dp": 2}, {**TWO, "zero": 3}),
        pytest.param({"pp": 2, "tp": 2}, TWO, marks=pytest.mark.full),
        pytest.param({"pp": 2}, {"microbatches": 4, "schedule": "dual_pipe_v"}, marks=pytest.mark.full),
    ],
    ids=["interleaved", "zero 3", "tp", "dual_pipe_v"],
)
def test_all_parameters_on_every_rank(sizes: dict[str, int], options: dict[str, Any]) -> None:
    for found in run_ranks(torch.Size(sizes.values()).numel(), worst, sizes, options, timeout=200):
        assert max(found.values()) < 1e-10, found

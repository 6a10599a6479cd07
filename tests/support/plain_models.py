"""Plain modules with their batches, and what tests of whole training steps on ranks share."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar

EXACT = 1e-10
ROWS = 8


class Net(nn.Module):
    """Two hidden layers, a frozen one, one that nobody uses; returns a loss and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.unused = nn.Linear(4, 4)
        self.second.requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.first(x))
        logits = self.head(h + nn.functional.gelu(self.second(h)))
        return {"loss": nn.functional.mse_loss(logits, target), "logits": logits}


class Tied(nn.Module):
    """An embedding that is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(16, 12), nn.Linear(12, 12), nn.Linear(12, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(tokens)
        h = h + torch.tanh(self.middle(h))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


class Losses(nn.Module):
    """Two losses, with a parameter in both."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(12, 16), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return nn.functional.mse_loss(self.left(h), target), nn.functional.l1_loss(self.right(h), target)


class Normed(nn.Module):
    """Batch norm over the whole batch, with running statistics and a counter of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.norm(self.conv(images))).mean((2, 3))
        logits = self.head(h)
        return nn.functional.cross_entropy(logits, labels), logits


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.drop = nn.Linear(12, 16), nn.Linear(16, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.head(self.drop(torch.relu(self.first(x)))), target)


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def numbers(seed: int = 0, rows: int = ROWS) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(rows, n, generator=g, dtype=torch.float64)  # noqa: E731
    return {"x": draw(12), "target": draw(8)}


def tokens(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 16, (ROWS, 6), generator=g)
    return {"tokens": ids, "labels": ids.roll(-1, 1).masked_fill(torch.rand(ROWS, 6, generator=g) < 0.3, -100)}


def images(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 3, 6, 6, generator=g, dtype=torch.float64)
    return {"images": x, "labels": torch.randint(0, 4, (ROWS,), generator=g)}


def part(batch: dict[str, Tensor], sizes: dict[str, int]) -> dict[str, Tensor]:
    """This rank's part: tp varies fastest."""
    ranks = sizes.get("dp", 1)
    return {k: v.chunk(ranks)[dist.get_rank() // sizes.get("tp", 1)] for k, v in batch.items()}


def put(model: nn.Module, batch: dict[str, Tensor], sizes: dict[str, int], **options: Any) -> autopar.ParallelModule:
    mesh = autopar.init_mesh("cpu", 30.0, **sizes)
    if any(p.grad is not None for p in model.parameters()):
        model = copy.deepcopy(model)  # has none
    return autopar.parallelize(model, mesh, example_batch=part(batch, sizes), **options)


class Metric(Net):
    """Returns a number that nobody differentiates, and one for each example."""

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        out = super().forward(x, target)
        right = out["logits"].argmax(1) == target.argmax(1)
        return {**out, "right": right, "accuracy": right.double().mean()}


def gap(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert set(found) == set(expected), set(found) ^ set(expected)
    return max(float((found[n] - e).abs().max()) for n, e in expected.items())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

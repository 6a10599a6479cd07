"""A small run for tests of saved state: a model with dropout, tied weights, norms and a schedule, on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autopar

Sizes = dict[str, int]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Tied(nn.Module):
    """Two blocks between an embedding and a head that share their weight; dropout; a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


def batch_of(number: int) -> dict[str, Tensor]:
    """The whole batch of a step."""
    g = torch.Generator().manual_seed(number)
    return {name: torch.randint(0, 16, (8, 4), generator=g) for name in ("x", "y")}


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups, one without decay; the learning rate of one is a tensor."""
    decayed, plain = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]
    groups = [{"params": decayed, "lr": 0.02}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


class Run:
    """A run on this rank, from its beginning: ``step()`` makes the next one and returns its loss."""

    def __init__(
        self, sizes: Sizes, make: Make = adamw, build: Callable[[], nn.Module] = Tied, seed: int = 0, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        model = build()
        model = model if any(p.is_meta for p in model.parameters()) else model.double()
        self.mesh = autopar.init_mesh("cpu", 60.0, **sizes)
        self.part, self.parts = autopar.dp_rank_and_size(self.mesh)
        if sizes.get("pp", 1) > 1:
            options = {"microbatches": 2, "schedule": "1f1b", **options}
        self.model = autopar.parallelize(model, self.mesh, example_batch=self.batch(0), seed=seed, **options)
        self.optimizer = make([*self.model.parameters()])
        given = all(group["lr"] is not None for group in self.optimizer.param_groups)  # some find one themselves
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20) if given else None
        self.average = autopar.ema(self.model, decay=0.9)
        self.number = 0

    def batch(self, number: int) -> dict[str, Tensor]:
        """This rank's part of the batch of a step."""
        return {name: x.chunk(self.parts)[self.part] for name, x in batch_of(number).items()}

    def step(self) -> float:
        loss = self.model.train_step(**self.batch(self.number))
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.average.update()
        self.optimizer.zero_grad()
        self.number += 1
        return float(loss)

    def save(self, folder: str, **how: Any) -> Any:
        how = {"extra": {"number": self.number}, "step": self.number, **how}
        return autopar.save(folder, self.model, self.optimizer, scheduler=self.scheduler, **how)

    def load(self, folder: str, **how: Any) -> Any:
        found = autopar.load(folder, self.model, self.optimizer, scheduler=self.scheduler, **how)
        self.number = found.extra["number"]
        return found


def undisturbed(steps: int, make: Make = adamw, sizes: Sizes | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a run that nobody stops, and its average at the end. On a rank."""
    run = Run(sizes or {"dp": 1}, make)
    losses = [run.step() for _ in range(steps)]
    return losses, averages(run)


def averages(run: Run) -> dict[str, Tensor]:
    """Whole, by name."""
    with run.average.applied():
        return dict(run.model.full_state_dict())

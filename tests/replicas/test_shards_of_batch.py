"""Losses and gradients of the shards of a batch, each computed by itself, add up to those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.mesh import Mesh
from tests.replicas.run import Model
from tests.support.ranks import run_ranks

EXACT, ROWS = 1e-10, 24


def batch() -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 6, (ROWS,), generator=drawn)
    labels[:5] = -100
    return {"x": torch.randn(ROWS, 8, generator=drawn, dtype=torch.float64), "labels": labels}


def model(dropout: bool) -> Model:
    torch.manual_seed(0)
    made = Model().double()
    made.drop.p = 0.2 if dropout else 0.0
    return made


def one_process(dropout: bool) -> tuple[float, dict[str, Tensor]]:
    parallel = autopar.parallelize(model(dropout), autopar.init_mesh("cpu", 30.0, dp=1), example_batch=batch())
    loss = parallel.train_step(**batch())
    return float(loss), {name: p.grad.full_tensor() for name, p in parallel.named_parameters()}


def added_up(sizes: dict[str, int], replicas: int, dropout: bool, options: dict[str, Any]) -> Any:
    """What the shards of this world's batch, one after another, add up to."""
    mesh = autopar.init_mesh("cpu", 30.0, **sizes)

    def shard(index: int) -> dict[str, Tensor]:
        rank, ranks = mesh.data_rank, mesh.data_size  # examples of a rank, and of these its shards
        return {name: x.chunk(ranks)[rank].chunk(replicas)[index] for name, x in batch().items()}

    parallel = autopar.parallelize(model(dropout), mesh, example_batch=shard(0), replicas=replicas, **options)
    totals = [sum(found) for found in zip(*(parallel.own_totals(**shard(i)) for i in range(replicas)), strict=True)]
    losses = []
    for i in range(replicas):
        parallel.training_steps = 0
        with parallel.shard_of_batch(i, totals):  # type: ignore[arg-type]
            losses.append(float(parallel.train_step(**shard(i))))
    return sum(losses), {name: p.grad.full_tensor() for name, p in parallel.named_parameters()}


CASES: list[tuple[dict[str, int], int, bool, dict[str, Any]]] = [
    ({"dp": 2}, 2, True, {"zero": 3}),
    ({"dp": 2}, 3, True, {"zero": 1, "microbatches": 2}),
    ({"tp": 2}, 4, True, {"microbatches": 3}),
    ({"pp": 2}, 3, False, {"microbatches": 2, "schedule": "1f1b", "split_points": ["second"]}),
    ({"dp_replicate": 2}, 2, False, {}),
]


@pytest.mark.parametrize("sizes, replicas, dropout, options", CASES, ids=[str(Mesh.of(**c[0])) for c in CASES])
def test_shards_add_up(sizes: dict[str, int], replicas: int, dropout: bool, options: dict[str, Any]) -> None:
    ((loss, gradients),) = run_ranks(1, one_process, dropout)
    for found, own in run_ranks(2, added_up, sizes, replicas, dropout, options):
        assert abs(found - loss) < EXACT
        for name, x in gradients.items():
            torch.testing.assert_close(own[name], x, atol=EXACT, rtol=0)


class Means(nn.Module):
    """Means over the batch: of a loss, of a regularizer, and of inputs into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
        h = self.layer(x - self.mean)
        return nn.functional.mse_loss(h.tanh(), torch.zeros_like(h)) + h.mean(-1).abs().mean(0)


def means(sizes: dict[str, int], shards: int) -> tuple[float, dict[str, Tensor]]:
    """Of the first shards of four, as replicas compute them; of one process, whose batch these are, for no sizes."""
    torch.manual_seed(0)
    whole = {name: x[: ROWS // 4 * shards] for name, x in batch().items()}
    mesh = autopar.init_mesh("cpu", 30.0, **sizes or {"dp": 1})
    rank, ranks = autopar.dp_rank_and_size(mesh)

    def shard(index: int) -> dict[str, Tensor]:
        return {name: x.chunk(shards)[index].chunk(ranks)[rank] for name, x in whole.items()}

    options: dict[str, Any] = {"example_batch": shard(0) if sizes else whole, "replicas": 4 if sizes else 1}
    model = autopar.parallelize(Means().double(), mesh, **options)
    if not sizes:
        losses = [float(model.train_step(**whole))]
    else:
        model.shards_present, losses = shards, []
        totals = [sum(found) for found in zip(*(model.own_totals(**shard(i)) for i in range(shards)), strict=True)]
        for i in range(shards):
            model.training_steps = 0
            with model.shard_of_batch(i, totals):  # type: ignore[arg-type]
                losses.append(float(model.train_step(**shard(i))))
        model.store_new_buffers()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return sum(losses), {**grads, "mean": model.full_state_dict()["mean"]}


@pytest.mark.parametrize("shards", [3, 4])
def test_means_are_over_those_present(shards: int) -> None:
    ((loss, found),) = run_ranks(1, means, {}, shards)
    for other, own in run_ranks(2, means, {"dp": 2}, shards):
        assert abs(other - loss) < EXACT
        for name, x in found.items():
            torch.testing.assert_close(own[name], x, atol=EXACT, rtol=0)

"""Random numbers on real ranks: over pipelines, slices of tokens, context and sequence parallelism, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.verification import Report
from tests.canonicalize.test_random import Net, batch, drop_path
from tests.support.ranks import run_ranks

F = nn.functional


class Blocks(nn.Module):
    """Layers for a pipeline, each with dropout, noise, and a coin that drops it for an example."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        start = torch.randn(x.shape[0], 1, 1)
        for layer in self.layers:
            x = x + drop_path(None, layer(x + 0.1 * torch.randn_like(x)))
        return F.mse_loss(self.head(x + start), y)


def verified(sizes: dict[str, int], options: dict[str, Any]) -> Report:
    mesh = autopar.init_mesh("cpu", 30.0, **sizes)
    g = torch.Generator().manual_seed(1)
    given = {n: torch.randn(8, 6, d, generator=g) for n, d in (("x", 8), ("y", 4))}
    return autopar.verify(Blocks(), mesh, given, seed=3, batch_dims={"x": 0, "y": 0}, **options)


@pytest.mark.parametrize(
    "sizes, options",
    [
        ({"pp": 2}, {"microbatches": 2}),
        ({"pp": 2}, {"microbatches": 2, "schedule": "zb_h1"}),
        ({"dp": 2}, {"zero": 3, "microbatches": 2}),
        ({"tp": 2}, {}),
    ],
    ids=str,
)
def test_ranks_draw_what_one_process_draws(sizes: dict[str, int], options: dict[str, Any]) -> None:
    report = run_ranks(2, verified, sizes, options)[0]
    report.raise_for_mismatch()
    assert report.entries[0].error < 1e-12


class Layer(nn.Module):
    """Causal attention with dropout, noise, an operator whose rule is derived, and one on a parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.projections, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.table = nn.Parameter(torch.randn(4, 4) * 0.1)

    def forward(self, h: Tensor) -> Tensor:
        rows, tokens, _ = h.shape
        q, k, v = self.projections(self.norm(h)).reshape(rows, tokens, 3, 4, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, tokens, 16)
        h = h + self.out(mixed)
        return F.dropout(h + 0.1 * torch.randn_like(h) * torch.sinc(h) + torch.trace(self.table) * h, 0.2)


class Tokens(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def verified_tokens(sizes: dict[str, int], options: dict[str, Any]) -> Report:
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    ids = torch.randint(0, 32, (4, 16), generator=torch.Generator().manual_seed(0))
    return autopar.verify(Tokens(sizes.get("pp", 1)), mesh, {"ids": ids, "labels": ids.roll(-1, 1)}, seed=3, **options)


@pytest.mark.parametrize(
    "sizes, options",
    [
        ({"pp": 2}, {"schedule": "seq1f1b", "microbatches": 2, "token_slices": 2}),
        ({"cp": 2}, {}),
        ({"tp": 2}, {"sequence_parallel": True}),
    ],
    ids=str,
)
def test_tokens_draw_where_they_stand(sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Over slices of tokens in time, over ranks, and in sequence parallelism."""
    report = run_ranks(2, verified_tokens, sizes, options)[0]
    report.raise_for_mismatch()
    assert report.entries[0].error < 1e-12


def stepped() -> tuple[list[float], list[float], float]:
    mesh = autopar.init_mesh("cpu", 30.0, dp=1)
    parallel = autopar.parallelize(Net(drop_path).double(), mesh, seed=1, example_batch=batch())
    training = [float(parallel.train_step(**batch())) for _ in range(3)]
    parallel.eval()
    return training, [float(parallel.eval_step(**batch())) for _ in range(2)], float(parallel.eval_step(**batch()))


def test_each_training_step_draws_anew() -> None:
    ((training, evaluated, again),) = run_ranks(1, stepped)
    assert len(set(training)) == 3
    assert evaluated == [again, again], "between training steps an evaluation draws the same"

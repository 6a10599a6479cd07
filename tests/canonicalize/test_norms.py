"""Norms and parametrised weights on meshes: losses, gradients and running statistics are those of one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from autopar.ir.mesh import Mesh
from autopar.testing.harness import check_model
from tests.support.plain_models import EXACT, build, gap, part, put
from tests.support.ranks import run_ranks


class Instances(nn.Module):
    """Instance norms of one, two and three dims of odd sizes: with weights, with running statistics, with neither, with
    both; and a norm over neighbouring channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 6, 1)
        self.one = nn.InstanceNorm1d(6, affine=True)
        self.two = nn.InstanceNorm2d(3, track_running_stats=True, momentum=0.3)
        self.plain, self.channels = nn.InstanceNorm2d(3), nn.LocalResponseNorm(3)
        self.three = nn.InstanceNorm3d(1, affine=True, track_running_stats=True, eps=1e-3)
        self.head = nn.Linear(15, 2)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = torch.tanh(self.one(self.conv(x)))  # [N, 6, 15]
        h = self.two(h.unflatten(-1, (3, 5)).unflatten(1, (3, 2)).flatten(2, 3))
        h = self.channels(self.plain(torch.tanh(h) * h)) + h  # [N, 3, 6, 5]
        h = self.three(h.unsqueeze(1) * h.mean()).flatten(2)
        return (self.head(torch.tanh(h).reshape(len(x), 6, 15)).mean(1) - target).square().mean()


def batch(rows: int = 4) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)  # noqa: E731
    return {"x": draw(rows, 2, 15), "target": draw(rows, 2)}


def test_instance_norms_are_exact() -> None:
    assert check_model(build(Instances), batch(), Mesh.of(dp=2, tp=2)).worst < EXACT


def running_statistics() -> float:
    """Two steps; then how far the buffers, and an evaluation with them, are from one process."""
    model, whole, sizes = build(Instances), batch(), {"dp": 2}
    parallel = put(model, whole, sizes)
    worst = 0.0
    for _ in range(2):
        loss = model(**whole)
        worst = max(worst, abs(float(parallel.train_step(**part(whole, sizes))) - float(loss)))
    worst = max(worst, gap(dict(parallel.named_buffers()), dict(model.named_buffers())))
    with torch.no_grad():
        expected = float(model.eval()(**whole))
    return max(worst, abs(float(parallel.eval_step(**part(whole, sizes))) - expected))


def test_running_statistics_are_those_of_one_process() -> None:
    assert max(run_ranks(2, running_statistics, timeout=200)) < EXACT


class Weights(nn.Module):
    """Weights that are made of others at every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.length = parametrizations.weight_norm(nn.Linear(6, 8))
        self.whole = nn.utils.weight_norm(nn.Linear(8, 8), dim=1)
        self.spectral = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.hooked = nn.utils.spectral_norm(nn.Linear(8, 4))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley")

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.whole(torch.relu(self.length(x))))
        return self.orthogonal(torch.tanh(self.hooked(self.spectral(h)))).square().mean()


def test_parametrised_weights_are_exact() -> None:
    result = check_model(build(Weights), {"x": batch()["x"].flatten(1)[:, :6]}, Mesh.of(dp=2, tp=2))
    assert result.worst < EXACT

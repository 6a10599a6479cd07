"""Trained parameters that the forward writes to, as max-norm and weight standardisation in place do: the gradient is
that of the new value, and the optimizer steps from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.testing.harness import check_model
from tests.support.ranks import run_ranks


def limited(model: Model) -> None:
    model.up.weight.data.renorm_(2, 0, 0.5)


@torch.no_grad()
def clamped(model: Model) -> None:
    model.up.weight.clamp_(-0.1, 0.1)
    model.words.weight[0].fill_(0.0)


@torch.no_grad()
def standardised(model: Model) -> None:
    w = model.up.weight
    w.sub_(w.mean(1, keepdim=True)).div_(w.std(1, keepdim=True))


def set_anew(model: Model) -> None:
    model.up.weight.data = F.normalize(model.up.weight.data, dim=1)


def decayed(model: Model) -> None:
    model.up.weight.detach().mul_(0.9)
    model.seen = model.up.weight.detach().norm()


def nothing(model: Model) -> None:
    """The lookup alone writes, by max_norm."""


class Model(nn.Module):
    def __init__(self, write: Callable[[Any], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write = write
        self.words = nn.Embedding(10, 8, max_norm=2.0 if write is nothing else None)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        self.write(self)
        return F.cross_entropy(self.down(torch.tanh(self.up(self.words(ids)))).mean(1), y)


def batch(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(0, 7, (4, 5), generator=g), "y": torch.randint(0, 4, (4,), generator=g)}


WRITES = (limited, standardised, set_anew, decayed)


def trained(write: Callable[[Any], None], sizes: dict[str, int], phases: bool, options: dict[str, Any]) -> float:
    """The largest difference of losses and parameters over three steps."""
    alone, mesh = Model(write).double(), autopar.init_mesh("cpu", 60.0, **sizes)
    at, parts = autopar.dp_rank_and_size(mesh)

    def mine(seed: int) -> dict[str, Tensor]:
        return {name: x.chunk(parts)[at] for name, x in batch(seed).items()}

    parallel = autopar.parallelize(Model(write).double(), mesh, example_batch=mine(0), **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (alone, parallel)]
    worst = 0.0
    for seed in range(3):
        loss = alone(**batch(seed))
        loss.backward()
        if phases:
            other = parallel(**mine(seed))
            other.backward()
        else:
            other = parallel.train_step(**mine(seed))
        worst = max(worst, abs(float(loss) - float(other)))
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    state = parallel.full_state_dict()
    return max(worst, *(float((state[n] - p).abs().max()) for n, p in alone.named_parameters()))


ON: list[tuple[dict[str, int], bool, dict[str, Any]]] = [
    ({"dp": 2}, False, {"zero": 3}), ({"tp": 2}, True, {}), ({"dp": 2}, True, {"zero": 1}),
    ({"pp": 2}, False, {"microbatches": 2}),
]  # fmt: skip


@pytest.mark.parametrize("write", [clamped, nothing, *(pytest.param(x, marks=pytest.mark.full) for x in WRITES)])
@pytest.mark.parametrize("sizes, phases, options", [ON[0], *(pytest.param(*x, marks=pytest.mark.full) for x in ON[1:])])
def test_as_in_one_process(
    write: Callable[[Any], None], sizes: dict[str, int], phases: bool, options: dict[str, Any]
) -> None:
    assert max(run_ranks(2, trained, write, sizes, phases, options)) < 1e-10


@pytest.mark.parametrize("write", [limited, decayed, nothing])
def test_rows_and_columns_are_sharded(write: Callable[[Any], None]) -> None:
    assert check_model(Model(write).double(), batch(0), Mesh.of(dp=2, tp=2)).worst < 1e-12


class Late(Model):
    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(ids, y)
        with torch.no_grad():
            self.words.weight.mul_(0.5)
        return loss


def test_a_write_after_its_use_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^capture: .* words.weight, which is trained, after it has computed"):
        check_model(Late(limited).double(), batch(0), Mesh.of(dp=2))


class Tied(Model):
    def __init__(self) -> None:
        super().__init__(nothing)
        self.down = nn.Linear(8, 10, bias=False)
        self.down.weight = self.words.weight

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.down(self.words(ids)).mean(1), y)


class Named(Model):
    """``code`` is an attribute of torch's graphs."""

    def __init__(self) -> None:
        super().__init__(decayed)
        self.register_buffer("code", torch.ones(()))

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        self.code.mul_(2.0)
        return super().forward(ids, y) * self.code


@pytest.mark.parametrize(
    "model, words",
    [
        (Tied, "writes to a parameter that is tied to another one"),
        (Named, "a tensor of the model is named code, .*; give"),
    ],
)
def test_what_torch_cannot_trace_is_said(model: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_model(model().double(), batch(0), Mesh.of(dp=2))


class Listed(Model):
    """Losses in a list, and Python's sum of it."""

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(ids, y)
        return sum([loss / 4, loss / 2])  # type: ignore[return-value]


def test_a_sum_of_a_list_over_microbatches() -> None:
    assert check_model(Listed(clamped).double(), batch(0), Mesh.of(dp=2), Options(microbatches=2)).worst < 1e-12

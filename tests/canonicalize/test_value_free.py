"""Functions of torch that ask for values on their way, or whose strides a mesh does not keep: loss and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.testing.harness import check_model
from autopar.testing.reference import LIMIT

WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "gaussian_nll_loss": lambda x, y: F.gaussian_nll_loss(x, y, F.softplus(x)),
    "of one variance a row, below eps": lambda x, y: F.gaussian_nll_loss(x, y, x[:, 0] ** 2, full=True, eps=0.3),
    "GaussianNLLLoss, one of a column": lambda x, y: nn.GaussianNLLLoss(reduction="sum")(x, y, x[:, :1] ** 2),
    "cov": lambda x, y: torch.cov(x.t()).fill_diagonal_(0).pow(2).sum() + x.flatten().cov(correction=0),
    "corrcoef": lambda x, y: torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1] + x[:, 0].corrcoef(),
    "fill_diagonal_ of a view": lambda x, y: (x.t() @ x).view(2, 8).fill_diagonal_(0).pow(2).sum(),
    "checks asked for": lambda x, y: (
        -Categorical(logits=x, validate_args=True).log_prob(y.argmax(-1)).mean()
        - Normal(x, 1.0, validate_args=True).log_prob(y).mean()
    ),
    "weights and smoothing": lambda x, y: F.cross_entropy(x, y.argmax(-1), WEIGHTS, label_smoothing=0.1),
    "and ignored labels": lambda x, y: F.cross_entropy(
        x, torch.where(y[:, 0] > 0.3, -100, y.argmax(-1)), WEIGHTS, label_smoothing=0.1
    ),
    "and a sum": lambda x, y: F.cross_entropy(
        x[..., None].expand(-1, -1, 3), y.argmax(-1, keepdim=True).expand(-1, 3), WEIGHTS, None, 2,
        reduction="sum", label_smoothing=0.2,
    ),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.loss = nn.Linear(4, 4), loss

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(self.inner(x), y)


class Pairs(nn.Module):
    """Weights that are pairs of a real and an imaginary part, whole and in part."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.pairs, self.more = nn.Linear(4, 4), *(nn.Parameter(torch.rand(n, 3, 2)) for n in (2, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = torch.view_as_complex(self.pairs) * torch.view_as_complex(self.more[1:3])
        return F.mse_loss(self.inner(x) * found.abs().sum(), y)


def checked(model: nn.Module, options: Options) -> float:
    made = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(8, 4, generator=made, dtype=torch.float64) for name in ("x", "y")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return check_model(model.double(), batch, Mesh.of(dp=2), options).worst


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_over_a_cut_batch(loss: Callable[[Tensor, Tensor], Any]) -> None:
    torch.manual_seed(0)  # a variance near 0 has gradients of a million
    assert checked(Net(loss), Options()) < LIMIT


def test_weights_of_pairs_that_are_gathered() -> None:
    assert checked(Pairs(), Options(zero=3)) < LIMIT

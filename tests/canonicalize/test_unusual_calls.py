"""Calls that few models make, in the forms that torch allows: equal to one process, or refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.front_end import capture
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.testing.harness import check_model

WIDTH = 6


class Around(nn.Module):
    """A call between two products."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.slope = nn.Parameter(torch.tensor(0.2))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.body(self, self.first(x))) ** 2).mean()


def scattered_from_a_row(model: Around, h: Tensor) -> Tensor:
    mask = torch.arange(4 * WIDTH).view(4, WIDTH) % 3 == 0
    return h + model.last.bias.masked_scatter(mask, model.first.bias.repeat(4))


def chunked_cross_entropy(model: Around, h: Tensor) -> Tensor:
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    labels = torch.tensor([1, 0, 5, 2])
    loss = F.linear_cross_entropy(h, model.last.weight, labels, linear_bias=model.last.bias, options=options)
    return h * loss


def batch_norm_with_its_statistics(model: Around, h: Tensor) -> Tensor:
    out, mean, scale = torch.native_batch_norm(h, None, None, None, None, True, 0.1, 1e-5)
    return out * scale + mean


CALLS: dict[str, Callable[[Around, Tensor], Tensor]] = {
    "one slope": lambda model, h: F.prelu(h, model.slope),
    "view_copy": lambda model, h: torch.view_copy(h, (2, 2, WIDTH)).tanh().view(4, WIDTH),
    "expand_copy": lambda model, h: torch.expand_copy(h[:, :1], (4, WIDTH)) * h,
    "narrow_copy": lambda model, h: torch.narrow_copy(h, 1, 1, 1) * h,
    "masked_scatter": scattered_from_a_row,
    "linear_cross_entropy": chunked_cross_entropy,
    "native_batch_norm": batch_norm_with_its_statistics,
    "linear with a vector": lambda model, h: (
        h * F.linear(h, model.last.bias)[:, None] + F.linear(h[0], model.first.bias)
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_equals_one_process(name: str, axis: str) -> None:
    if name == "linear_cross_entropy" and not hasattr(F, "linear_cross_entropy"):
        return  # torch 2.12 has none
    batch = {"x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).double()}
    assert (
        check_model(Around(CALLS[name]).double(), batch, Mesh.of(**{axis: 2}), Options(batch_dims={"x": 0})).worst
        < 1e-12
    )


class Sparse(nn.Module):
    """A product with a sparse matrix: a buffer, or made in the forward."""

    def __init__(self, kept: Tensor | None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 4))
        self.register_buffer("graph", kept)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(4)
        made = self.graph
        if made is None:
            made = torch.sparse_coo_tensor(torch.stack([places, places]), torch.ones(4), (4, 4))
        return torch.sparse.mm(made, (x @ self.w).t()).sum()


@pytest.mark.parametrize(
    ("kept", "found"),
    [
        (torch.eye(4).to_sparse_csr(), "graph of layout torch.sparse_csr"),
        (torch.eye(4).to_sparse(), "graph of layout torch.sparse_coo"),
        (None, "torch.sparse_coo_tensor.*found one of layout torch.sparse_coo"),
    ],
)
def test_sparse_matrices_are_refused(kept: Tensor | None, found: str) -> None:
    with pytest.raises(ValueError, match=rf"{found}; keep its indices and values, and use index_add, or make it dense"):
        capture(Sparse(kept), {"x": torch.randn(2, 3)})

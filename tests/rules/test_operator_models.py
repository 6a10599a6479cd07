"""Losses and layers of users, each on a mesh: the numbers of one process, or a refusal that says where samples meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.testing.harness import check_model
from tests.support.plain_models import EXACT

ROWS, WIDTH = 4, 8
Way = Callable[[Any, Tensor, Tensor], Tensor]  # of a model, two views of the batch, and labels or targets: a loss
LABELS, SIGNS = torch.tensor([0, 1, 0, 1]), torch.tensor([1.0, -1.0, 1.0, -1.0]).double()


class Pair(nn.Module):
    """Two embeddings of one batch, and a few weights: ``way`` makes a loss of them."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.left, self.right = way, nn.Linear(6, WIDTH), nn.Linear(6, WIDTH)
        self.table, self.filters = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(5, 2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, self.left(x), self.right(x))


def put(x: Tensor, where: Any, value: Any) -> Tensor:
    x = x.clone()
    x[where] = value
    return x


def batch_hard(m: Pair, a: Tensor, b: Tensor) -> Tensor:
    far, same = torch.cdist(a, a), LABELS[:, None] == LABELS
    return F.relu((far * same).amax(1) - far.masked_fill(same, 1e9).amin(1) + 0.3).mean()


def barlow(m: Pair, a: Tensor, b: Tensor) -> Tensor:
    c = ((a - a.mean(0)) / a.std(0)).T @ ((b - b.mean(0)) / b.std(0)) / len(a)
    return (torch.diagonal(c) - 1).square().sum() + 0.1 * (c - torch.diag(torch.diag(c))).square().sum()


def filtered(m: Pair, a: Tensor, b: Tensor) -> Tensor:
    """A layer of a Fourier neural operator: the lowest modes are multiplied, and written into zeros."""
    modes = torch.fft.rfft(a)
    out = torch.zeros(len(a), 5, dtype=modes.dtype)
    out[:, :2] = modes[:, :2] * torch.view_as_complex(m.filters)[:2]
    out[:, 3] = modes[:, 2].conj()
    return torch.fft.irfft(out, n=WIDTH).square().mean()


def moved(m: Pair, a: Tensor, b: Tensor) -> Tensor:
    """A spatial transformer."""
    images = b.reshape(-1, 2, 2, 2)
    grid = F.affine_grid(a[:, :6].reshape(-1, 2, 3), [len(a), 2, 3, 5], align_corners=False)
    return F.grid_sample(images, grid, align_corners=False).square().mean()


EXACT_ON_ALL: dict[str, Way] = {
    "triplet": lambda m, a, b: F.triplet_margin_loss(a, b, a.roll(1, 1), swap=True),
    "cosine embedding": lambda m, a, b: F.cosine_embedding_loss(a, b, SIGNS[:1].expand(len(a)), margin=0.2),
    "margin ranking": lambda m, a, b: F.margin_ranking_loss(a.mean(1), b.mean(1), b.detach().sign()[:, 0], margin=0.2),
    "hinge embedding": lambda m, a, b: F.hinge_embedding_loss(a, b.detach().sign()),
    "multi margin": lambda m, a, b: F.multi_margin_loss(a, b.detach().argmax(1), p=2, weight=m.table[0].detach().abs()),
    "multilabel margin": lambda m, a, b: F.multilabel_margin_loss(a, b.detach().argsort(1).masked_fill(b > 0, -1)),
    "soft margin": lambda m, a, b: F.soft_margin_loss(a, b.detach().sign()),
    "poisson": lambda m, a, b: F.poisson_nll_loss(a, b.detach().exp().round(), full=True),
    "similarities": lambda m, a, b: F.cosine_similarity(a[:, None], b[None], dim=-1).square().mean(),
    "distances": lambda m, a, b: torch.cdist(a, m.table).square().mean() + F.pairwise_distance(a, b).mean(),
    "batch-hard triplets": batch_hard,
    "Barlow twins": barlow,
    "trace of a Gram matrix": lambda m, a, b: torch.trace(a.T @ b),
    "pairs": lambda m, a, b: torch.pdist(F.normalize(a)).square().mul(-2).exp().mean().log(),
    "one value in two places": lambda m, a, b: torch.einsum("bi,ci,di->bcd", a, a, a).square().mean(),
    "matrices side by side": lambda m, a, b: torch.block_diag(a, b).square().mean() + torch.diag_embed(a)[:, 0].mean(),
    "added outer products": lambda m, a, b: torch.addbmm(m.table, a[:, :, None], b[:, None], alpha=0.5).square().mean(),
    "moments": lambda m, a, b: torch.stack(torch.var_mean(a, 0)).sum() + a.nanmean() + torch.dist(a, m.table[0]),
    "quantiles": lambda m, a, b: torch.quantile(a, 0.3, dim=1).mean() + a.renorm(2, 1, 1.0).square().mean(),
    "a part put": lambda m, a, b: put(a, (slice(None), [0, 3]), m.table[0, :2]).square().mean(),
    "put where a mask says": lambda m, a, b: put(a, b.detach()[:, 0] > 0, m.table[0]).square().mean(),
    "put into a table": lambda m, a, b: put(m.table * 1.0, 2 * torch.arange(ROWS), b).square().mean(),
    "added to a table": lambda m, a, b: m.table.index_put((b.detach().argmax(1),), b, accumulate=True).square().mean(),
    "taken, put flat": lambda m, a, b: a.put(torch.tensor([3, 9]), m.table[0, :2]).take(torch.arange(7)).mean(),
    "complex modes": filtered,
    "a spatial transformer": moved,
    "shuffled channels": lambda m, a, b: (F.channel_shuffle(a.reshape(-1, 4, 2), 2) * b.reshape(-1, 4, 2)).mean(),
}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp=2, zero=3": ({"dp": 2}, {"zero": 3}),
    "tp=2": ({"tp": 2}, {}),
    "dp=2, tp=2": ({"dp": 2, "tp": 2}, {}),
}


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)}


@pytest.mark.parametrize(
    "name, mesh",
    [  # each on one of them, in turn
        pytest.param(name, mesh, marks=() if (i + k) % len(MESHES) == 0 else pytest.mark.full)
        for i, name in enumerate(EXACT_ON_ALL)
        for k, mesh in enumerate(MESHES)
    ],
)
def test_the_numbers_of_one_process(name: str, mesh: str) -> None:
    sizes, options = MESHES[mesh]
    dims = Options(batch_dims={"x": 0}, **options)
    assert check_model(Pair(EXACT_ON_ALL[name]), batch(), Mesh.of(**sizes), dims).worst < EXACT


class Attends(nn.Module):
    """Sequence first, one head per rank, keys of another width."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(WIDTH, 2, kdim=6, vdim=6).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.attention(x.transpose(0, 1), y.transpose(0, 1), y.transpose(0, 1))[0].square().mean()  # type: ignore[no-any-return]


def test_a_view_that_changes_nothing_in_a_piece() -> None:
    x, y = (torch.randn(ROWS, n, width, dtype=torch.float64) for n, width in ((6, WIDTH), (3, 6)))
    assert check_model(Attends(), {"x": x, "y": y}, Mesh.of(tp=2)).worst < EXACT


def test_a_gradient_that_all_ranks_compute_alike() -> None:
    """Of a system of equations over the batch, by an operator of which no rule says that it is linear."""

    def solved(m: Pair, a: Tensor, b: Tensor) -> Tensor:
        modes = torch.fft.rfft(a)
        return (
            torch.linalg.solve(modes.mH @ modes + torch.eye(5), torch.view_as_complex(m.filters)[:, None]).abs().mean()
        )

    assert check_model(Pair(solved), batch(), Mesh.of(dp=2), Options(batch_dims={"x": 0})).worst < EXACT


@pytest.mark.parametrize("name, where", [("batch-hard triplets", "cdist"), ("put into a table", "index_put")])
def test_where_samples_of_microbatches_meet(name: str, where: str) -> None:
    options = Options(microbatches=2, batch_dims={"x": 0})
    with pytest.raises(ValueError, match=rf"microbatches meet at aten\.{where}.* at .*test_operator_models.py:\d+ in"):
        check_model(Pair(EXACT_ON_ALL[name]), batch(), Mesh.of(dp=1), options)


def test_a_rule_that_is_missing_names_the_line() -> None:
    model = Pair(lambda m, a, b: torch.nanmedian(a - b))
    with pytest.raises(
        ValueError,
        match=r"no sharding rule for aten\.nanmedian\.default .*test_operator_models.py:\d+ in .*replicate_ops=",
    ):
        check_model(model, batch(), Mesh.of(dp=2))
    whole = Options(replicate_ops=("aten.nanmedian.default",))
    assert check_model(model, batch(), Mesh.of(dp=2), whole).worst < EXACT

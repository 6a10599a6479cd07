"""Rows of a source fill the true entries of a mask (masked_scatter), as features of images stand in a text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.ops.value_checks import take_notes
from autopar.options import Options
from autopar.testing.harness import MeshRun, check_model
from autopar.testing.reference import eager


class Filled(nn.Module):
    """Tokens of id 1 are the places of image features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.image = nn.Embedding(16, 8), nn.Linear(6, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids: Tensor, pixels: Tensor, target: Tensor) -> Tensor:
        x, features = self.embed(ids), self.image(pixels).flatten(0, 1)
        x = x.masked_scatter((ids == 1).unsqueeze(-1).expand_as(x), features)
        return F.mse_loss(x + self.down(torch.relu(self.up(x))), target)


def batch(*places: int) -> dict[str, Tensor]:
    """One row per number: how many of its tokens are places."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 16, (len(places), 6), generator=g)
    for row, count in enumerate(places):
        ids[row, 1 : 1 + count] = 1
    draw = {n: torch.randn(*s, generator=g, dtype=torch.float64) for n, s in _shapes(len(places)).items()}
    return {"ids": ids, **draw}


def _shapes(rows: int) -> dict[str, tuple[int, ...]]:
    return {"pixels": (rows, 2, 6), "target": (rows, 6, 8)}


@pytest.fixture
def model() -> Iterator[nn.Module]:
    torch.manual_seed(0)
    take_notes()
    yield Filled().double()
    take_notes()


@pytest.mark.parametrize(
    "mesh, options",
    [({"dp": 2, "tp": 2}, {"zero": 3}), ({"dp": 2}, {"microbatches": 2}), ({"tp": 2}, {}), ({"tp": 4}, {})],
    ids=str,
)
def test_same_numbers(model: nn.Module, mesh: dict[str, int], options: dict[str, int]) -> None:
    assert check_model(model, batch(2, 2, 2, 2), Mesh.of(**mesh), Options(**options)).worst < 1e-10
    assert not take_notes()


def test_ranks_may_have_rows_of_several_lengths(model: nn.Module) -> None:
    """What counts is that a rank's places are as many as its rows."""
    assert check_model(model, batch(1, 3, 3, 1), Mesh.of(dp=2)).worst < 1e-10
    assert not take_notes()


def test_rows_of_another_rank_are_noticed(model: nn.Module) -> None:
    """One process takes the first rows for all four examples; each rank of two would take its own."""
    few, mesh = batch(1, 1, 1, 1), Mesh.of(dp=2)
    made = compile_model(model, few, mesh, lift_to_float64=True, outputs=())
    assert MeshRun(made, model, few, mesh).errors(eager(model, few))[1].worst > 1e-3
    said = [str(note.problem(note.extremes)) for note in take_notes()]
    assert said and "fills 2 entries" in said[0] and "rank that has 4 rows" in said[0] and '"ids"' in said[0]


def test_more_places_than_rows(model: nn.Module) -> None:
    made = compile_model(model, batch(2, 2, 2, 2), Mesh.of(dp=2), lift_to_float64=True, outputs=())
    with pytest.raises(RuntimeError, match="elements of source < number of ones in mask"):
        MeshRun(made, model, batch(1, 2, 3, 2), Mesh.of(dp=2)).errors(eager(model, batch(2, 2, 2, 2)))

"""Pieces of one row, which lie along any dim of size one: one head per rank, one example per rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.rules import Cat, Rule
from autopar.rules.local_types import is_vague, through
from autopar.testing.harness import check_model


class AllResults(nn.Module):
    """Attention whose weights are a part of the loss, too."""

    def __init__(self, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16).double()
        self.attention = nn.MultiheadAttention(16, heads, dropout, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return sum(t.mean() for t in self.attention(x, x, x))  # type: ignore[return-value]


@pytest.mark.parametrize(
    "mesh, rows, heads, dropout, zero",
    [("dp=2", 2, 4, 0.1, 0), ("dp=4", 4, 4, 0.1, 3), ("dp=2,tp=2", 4, 2, 0.0, 3), ("dp=2,tp=2", 2, 2, 0.1, 3)],
)
def test_equals_one_process(mesh: str, rows: int, heads: int, dropout: float, zero: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 8, 16).double()
    assert check_model(AllResults(heads, dropout), {"x": x}, Mesh.parse(mesh), Options(zero=zero)).worst < 1e-10


class Kinds(nn.Module):
    """A vector for the kind of each example: kind [rows] or [rows, 1], x and target [rows, tokens, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.head = nn.Embedding(6, 8), nn.Linear(8, 8)

    def forward(self, kind: Tensor, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.head(x + self.kind(kind).view(len(kind), 1, 8)).tanh(), target)


@pytest.mark.parametrize(
    "mesh, shape, parts", [("tp=2", (4, 1), 1), ("tp=3", (4, 1), 1), ("tp=2", (4,), 4), ("dp=2,tp=2", (4,), 2)]
)
def test_one_index_of_a_vocabulary(mesh: str, shape: tuple[int, ...], parts: int) -> None:
    """Ids less the number of a rank's first row aren't a piece of ids along a dim of size one."""
    torch.manual_seed(0)
    kind = torch.tensor([1, 5, 0, 3]).view(shape)
    batch = {"kind": kind, "x": torch.randn(4, 3, 8).double(), "target": torch.randn(4, 3, 8).double()}
    found = check_model(Kinds().double(), batch, Mesh.parse(mesh), Options(microbatches=parts))
    assert str(found.compiled.plan.parameter("kind.weight", "tp").used) == "S(0)"
    assert found.worst < 1e-10


def test_vague_is_what_has_no_known_rows_in_any_reading() -> None:
    assert is_vague(frozenset({(2, 0), (3, 0)}))
    assert not is_vague(frozenset({(2, 0), (3, 4)})) and not is_vague(frozenset({(2, 0), "replicated"}))


def put_together(parts: int) -> list[frozenset[object]]:
    """What a concatenation makes of parts of one row, each of which may or may not be a piece along it."""
    names = tuple(f"part {i}" for i in range(parts))
    operands = tuple((("rows",), (name,)) for name in names)
    rule = Rule(operands, ((("rows",), Cat(names)),), {"rows": 2, **dict.fromkeys(names, 1)})
    return [*through(rule, [frozenset({(1, 1), (1, 0)})] * parts)]


def test_many_parts_that_may_be_read_in_two_ways_are_not_read_in_all_combinations() -> None:
    assert put_together(40) == put_together(3) == put_together(2) == [frozenset({(1, 1), (1, 0)})]

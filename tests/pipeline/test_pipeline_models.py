"""Every schedule on every kind of mesh: loss and all gradients of whole models equal one process, on real ranks.

One model runs on four stages, and one layer of it on two beside another axis, a second one on two stages alone; with
``-m full`` they and three more run on all, with two layers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.schedule.request import SCHEDULES
from tests.support.cases import Cell, check_ran, ran

RARE = ("bert", "gpt2", "vit", "t5")  # run with -m full only, but for the first on two stages
MESHES: dict[str, dict[str, Any]] = {"pp=2": {}, "pp=4": {}, "pp=2,dp=2": {}, "pp=2,tp=2": {}}
ZERO: dict[str, dict[str, Any]] = {"pp=2,dp=2": {"zero": 3}}
SLICED = [name for name, entry in SCHEDULES.items() if entry.sliced]
WHOLE = [name for name, entry in SCHEDULES.items() if not entry.sliced]
Sliced = tuple[str, str, int | tuple[int, ...], dict[str, Any]]
# (model, mesh, slices, options): causal models, even and uneven slices, sliding windows, grouped and single key heads
SLICES: list[Sliced] = [
    ("llama", "pp=4", 4, {}),
    ("one-layer llama", "pp=2,dp=2", (3, 9, 4), {"zero": 3}),
    ("one-layer llama", "pp=2,tp=2", (6, 10), {"sequence_parallel": True}),
    ("one-layer gpt2", "pp=2", (1, 12, 3), {}),
    ("gemma3", "pp=2", (7, 5, 4), {}),
]
MORE_SLICES: list[Sliced] = [
    ("llama", "pp=2", (7, 5, 4), {}),
    ("llama", "pp=2,dp=2", 2, {}),
    ("llama", "pp=2,dp=2", (3, 9, 4), {"zero": 3}),
    ("llama", "pp=2,tp=2", (7, 5, 4), {}),
    ("llama", "pp=2,tp=2", (6, 10), {"sequence_parallel": True}),
    ("gpt2", "pp=2", 4, {}),
    ("gpt2", "pp=4", (1, 12, 3), {}),
    ("gpt2", "pp=2,tp=2", 2, {}),
]


def whole_cell(model: str, mesh: str, chunks: int, **options: Any) -> Cell:
    """Cut into ``chunks`` parts per rank."""
    sizes = Mesh.parse(mesh)
    schedule = "1f1b" if chunks == 1 else "interleaved"
    return Cell(
        model, sizes, Options(microbatches=2 * sizes.size("pp"), schedule=schedule, virtual_stages=chunks, **options)
    )


def cells(*models: str) -> list[Cell]:
    ways = [*MESHES.items(), *ZERO.items()]
    return [whole_cell(model, mesh, n, **options) for model in models for mesh, options in ways for n in (1, 2)]


ALL = cells("llama", *RARE)
OFTEN = [
    *(c for c in ALL if c.name == "llama" and str(c.mesh) == "pp=4"),
    *(c for c in cells("one-layer llama") if c.options.zero or "tp" in c.mesh.sizes),
    *(c for c in cells("one-layer bert") if str(c.mesh) == "pp=2"),
]


@pytest.mark.parametrize(
    "cell", [*OFTEN, *(pytest.param(c, marks=pytest.mark.full) for c in ALL if c not in OFTEN)], ids=str
)
def test_all_schedules(cell: Cell) -> None:
    check_ran(ran(cell, [name for name in WHOLE if SCHEDULES[name].virtual_stages == cell.options.virtual_stages]))


def test_every_schedule_meets_every_mesh() -> None:
    """As cells of as many parts run all that have as many."""
    assert {SCHEDULES[name].virtual_stages for name in WHOLE} == {1, 2}
    assert {(str(c.mesh), c.options.virtual_stages) for c in OFTEN} == set(itertools.product(MESHES, (1, 2)))


def sliced_cell_of(of: Sliced) -> Cell:
    model, mesh, slices, options = of
    return Cell(model, Mesh.parse(mesh), Options(microbatches=2, schedule="seq1f1b", token_slices=slices, **options))


@pytest.mark.parametrize(
    "cell",
    [*map(sliced_cell_of, SLICES), *(pytest.param(sliced_cell_of(of), marks=pytest.mark.full) for of in MORE_SLICES)],
    ids=str,
)
def test_token_slices(cell: Cell) -> None:
    check_ran(ran(cell, SLICED))

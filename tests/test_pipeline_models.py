"""Every schedule on every kind of mesh: loss and all gradients of whole models equal one process, on real ranks.

A second model runs on meshes of stages alone; with ``-m full`` it and three more run on all."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.schedule.request import SCHEDULES
from tests.cells import Cell, check_ran, ran

RARE = ("bert", "gpt2", "vit", "t5")  # run with -m full only, but for the first on meshes of stages alone
MESHES: dict[str, dict[str, Any]] = {"pp=2": {}, "pp=4": {}, "pp=2,dp=2": {}, "pp=2,tp=2": {}}
ZERO: dict[str, dict[str, Any]] = {"pp=2,dp=2": {"zero": 3}}
SLICED = [name for name, entry in SCHEDULES.items() if entry.sliced]
WHOLE = [name for name, entry in SCHEDULES.items() if not entry.sliced]
# (model, mesh, slices, options): causal models, even and uneven slices, sliding windows, grouped and single key heads
SLICES: list[tuple[str, str, int | tuple[int, ...], dict[str, Any]]] = [
    ("llama", "pp=2", (7, 5, 4), {}),
    ("llama", "pp=4", 4, {}),
    ("llama", "pp=2,dp=2", 2, {}),
    ("llama", "pp=2,dp=2", (3, 9, 4), {"zero": 3}),
    ("llama", "pp=2,tp=2", (7, 5, 4), {}),
    ("llama", "pp=2,tp=2", (6, 10), {"sequence_parallel": True}),
    ("gpt2", "pp=2", 4, {}),
    ("gpt2", "pp=4", (1, 12, 3), {}),
    ("gpt2", "pp=2,tp=2", 2, {}),
    ("gemma3", "pp=2", (7, 5, 4), {}),
]


def whole_cell(model: str, mesh: str, chunks: int, **options: Any) -> Cell:
    """Cut into ``chunks`` parts per rank."""
    sizes = Mesh.parse(mesh)
    schedule = "1f1b" if chunks == 1 else "interleaved"
    return Cell(model, sizes, Options(micro_batches=2 * sizes.size("pp"), schedule=schedule, chunks=chunks, **options))


def cells(*models: str) -> list[Cell]:
    ways = [*MESHES.items(), *ZERO.items()]
    return [whole_cell(model, mesh, n, **options) for model in models for mesh, options in ways for n in (1, 2)]


OFTEN = [*cells("llama"), *(c for c in cells("bert") if {*c.mesh.sizes} == {"pp"})]


@pytest.mark.parametrize(
    "cell", [*OFTEN, *(pytest.param(c, marks=pytest.mark.full) for c in cells(*RARE) if c not in OFTEN)], ids=str
)
def test_all_schedules(cell: Cell) -> None:
    check_ran(ran(cell, [name for name in WHOLE if SCHEDULES[name].chunks == cell.options.chunks]))


def sliced_cell(model: str, mesh: str, slices: int | tuple[int, ...], options: dict[str, Any]) -> Cell:
    return Cell(model, Mesh.parse(mesh), Options(micro_batches=2, schedule="seq1f1b", slices=slices, **options))


@pytest.mark.parametrize("cell", [sliced_cell(*of) for of in SLICES], ids=str)
def test_token_slices(cell: Cell) -> None:
    check_ran(ran(cell, SLICED))

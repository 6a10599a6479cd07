"""Five models of transformers on each axis alone: loss and every gradient equal those of one process in float64. What
`make test-versions` runs with every pair of versions; the suite has the same on larger meshes."""

from __future__ import annotations

import pytest

from autopar.ir.mesh import Mesh
from autopar.options import Options
from tests.support.cases import Cell, called, check

MODELS = ("llama", "gpt2", "t5", "mixtral", "vit")
MESHES = {"dp=2": Options(), "tp=2": Options(), "pp=2": Options(microbatches=2), "cp=2": Options()}
WITHOUT_SEQUENCE = {"vit"}  # that could be sharded on cp
CELLS = [
    Cell(model, Mesh.parse(mesh), options)
    for model in MODELS
    for mesh, options in MESHES.items()
    if not (mesh == "cp=2" and model in WITHOUT_SEQUENCE)
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_equals_one_process(cell: Cell) -> None:
    check(called(cell))

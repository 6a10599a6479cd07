"""Whole models on every mesh: loss and every gradient equal those of one process. Each cell is compiled once; real gloo
ranks run it through what users call, and for three models the simulator runs what has all options at once, too.

Each model meets dp and tp together, and one of them alone, of 2 or of 4 ranks; the options are such that each value of
each option meets each model and each mesh. ``pytest -m full`` runs the whole product instead, which has six models
more, and plays every tiny model in the simulator.
"""

from __future__ import annotations

import itertools

import pytest

from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.options import Options
from tests.support.cases import Cell, called, check, simulated

# Each structure of these is in a model of `WAYS`: ties and heads in gpt2, norms of heads in gemma3, decoders of encoded
# texts in t5 and whisper, experts in mixtral.
RARE = ["llama_mha", "llama_tied", "qwen3", "opt", "bart", "qwen3_moe"]
MESHES = ("dp=2", "tp=2", "dp=2,tp=2", "tp=4", "dp=4")
# These have no sequence that could be sharded on tp.
WITHOUT_SEQUENCE = {"cnn", "mlp"}

Way = tuple[str, int, bool, int]  # mesh, zero, sequence parallel, microbatches
BOTH = "dp=2,tp=2"
ALL: Way = (BOTH, 3, True, 2)
OFTEN: list[Way] = [("tp=2", 0, False, 1), ALL]
# One layer of a kind says as much as two, but where they share something or differ, and where they follow each other.
WAYS: dict[str, list[Way]] = {
    "llama": [("tp=4", 0, True, 1), ("dp=4", 3, False, 1), ALL],
    "one-layer gpt2": OFTEN,
    "gemma3": [("dp=2", 3, False, 2), (BOTH, 0, True, 1)],
    "one-layer phi3": [("tp=4", 0, False, 2), (BOTH, 3, True, 1)],
    "one-layer bert": OFTEN,
    "t5": OFTEN,
    "one-layer vit": [("dp=2", 0, False, 1), (BOTH, 3, True, 2)],
    "one-layer whisper": [("tp=2", 0, True, 2), (BOTH, 3, False, 1)],
    "cnn": [("dp=2", 3, False, 1), (BOTH, 0, False, 2)],
    "mlp": [("dp=4", 0, False, 2), (BOTH, 3, False, 1)],
    "one-layer mixtral": OFTEN,
}


def cell_of(model: str, way: Way) -> Cell:
    """Without what says nothing on this mesh or cannot be for this model."""
    mesh, zero, sequence, micro = way
    sequence = sequence and "tp" in mesh and model not in WITHOUT_SEQUENCE
    zero = zero if "dp" in mesh else 0
    return Cell(model, Mesh.parse(mesh), Options(zero=zero, sequence_parallel=sequence, microbatches=micro))


CELLS = [cell_of(name, way) for name, ways in WAYS.items() for way in ways]
SIMULATED = [cell_of(name, ALL) for name in ("llama", "one-layer bert", "one-layer mixtral")]
EVERY_WAY = itertools.product(MESHES, (0, 3), (False, True), (1, 2))
ALL_SIMULATED = [
    *(cell_of(name, way) for name, ways in WAYS.items() for way in [*ways, ("dp=2", 0, False, 1)] if ALL in ways),
    *(cell_of(name, ALL) for name in TINY),
]
WHOLE = [name.removeprefix("one-layer ") for name in WAYS]
PRODUCT = [cell_of(*of) for of in itertools.product(WHOLE + RARE, EVERY_WAY)]


def test_each_option_meets_each_model_and_each_mesh() -> None:
    for model in WAYS:
        mine = [c.options for c in CELLS if c.name == model]
        assert {o.zero for o in mine} == {0, 3} and {o.microbatches for o in mine} == {1, 2}
        assert len({o.sequence_parallel for o in mine}) == (1 if model in WITHOUT_SEQUENCE else 2)
        assert {len(c.mesh.sizes) for c in CELLS if c.name == model} == {1, 2}
    for mesh in map(Mesh.parse, MESHES):
        mine = [c.options for c in CELLS if c.mesh == mesh]
        assert {o.microbatches for o in mine} == {1, 2}
        assert len({o.zero for o in mine}) == (2 if "dp" in mesh.sizes else 1)
        assert len({o.sequence_parallel for o in mine}) == (2 if "tp" in mesh.sizes else 1)


@pytest.mark.parametrize("cell", SIMULATED, ids=str)
def test_simulated(cell: Cell) -> None:
    check(simulated(cell))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_equals_one_process(cell: Cell) -> None:
    check(called(cell))


@pytest.mark.full
@pytest.mark.parametrize("cell", dict.fromkeys(PRODUCT), ids=str)
def test_equals_one_process_with_all_options(cell: Cell) -> None:
    check(called(cell))


@pytest.mark.full
@pytest.mark.parametrize("cell", [c for c in dict.fromkeys(ALL_SIMULATED) if c not in SIMULATED], ids=str)
def test_every_tiny_model_simulated(cell: Cell) -> None:
    check(simulated(cell))

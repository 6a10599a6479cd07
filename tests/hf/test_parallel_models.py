"""Whole models on every mesh: loss and every gradient equal those of one process. Each cell is compiled once; real gloo
ranks run it through what users call, and for five models the simulator runs what has all options at once, too.

Each model meets one mesh of dp, one of tp and one of both, in turn of 2 and of 4 ranks; the options rotate, such that
each value of each option meets each model and each mesh. ``pytest -m full`` runs the whole product instead, which has
six models more, and plays every tiny model in the simulator.
"""

from __future__ import annotations

import itertools

import pytest

from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.options import Options
from tests.cells import Cell, called, check, simulated

# One layer of a kind says as much as two, but where they share something or differ, and where they follow each other.
MODELS = [
    "llama", "one-layer gpt2", "gemma3", "one-layer phi3", "one-layer bert", "t5", "one-layer vit", "one-layer whisper",
    "cnn", "mlp", "one-layer mixtral",
]  # fmt: skip
# Each structure of these is in one of the others: ties and heads in gpt2, norms of heads in gemma3, decoders of encoded
# texts in t5 and whisper, experts in mixtral.
RARE = ["llama_mha", "llama_tied", "qwen3", "opt", "bart", "qwen3_moe"]
MESHES = ("dp=2", "tp=2", "dp=2,tp=2", "tp=4", "dp=4")
# These have no sequence that could be cut over tp.
WITHOUT_SEQUENCE = {"cnn", "mlp"}

Way = tuple[str, int, bool, int]  # mesh, zero, sequence parallel, micro-batches
ALL: Way = ("dp=2,tp=2", 3, True, 2)
FOUR: list[Way] = [("dp=2,tp=2", 0, False, 1), ("tp=4", 0, True, 1), ("dp=4", 3, False, 1), ALL]
# Models that meet all options at once, and tp by itself; the first one meets all four.
MOST: dict[str, list[Way]] = {
    "llama": FOUR,
    **{
        name: [("dp=2", 0, False, 1), ("tp=2", 0, False, 1), ALL]
        for name in ("one-layer gpt2", "t5", "one-layer mixtral", "one-layer bert")
    },
}


def rotated(model: int) -> list[Way]:
    """The meshes of a model, by its number, and the options on each."""
    size, zero, sequence, micro = 2 + 2 * (model % 2), 3 * (model // 2 % 2), model // 4 % 2 == 1, 1 + model // 2 % 2
    return [
        (f"dp={size}", zero, False, micro),
        (f"tp={size}", 0, sequence, 3 - micro),
        ("dp=2,tp=2", 3 - zero, not sequence, 1 + model % 2),
    ]


def cell_of(model: str, way: Way) -> Cell:
    """Without what says nothing on this mesh or cannot be for this model."""
    mesh, zero, sequence, micro = way
    sequence = sequence and "tp" in mesh and model not in WITHOUT_SEQUENCE
    zero = zero if "dp" in mesh else 0
    return Cell(model, Mesh.parse(mesh), Options(zero=zero, sequence_parallel=sequence, micro_batches=micro))


CELLS = [cell_of(name, way) for i, name in enumerate(MODELS) for way in MOST.get(name) or rotated(i)]
SIMULATED = [cell_of(name, ALL) for name in MOST]
EVERY_WAY = itertools.product(MESHES, (0, 3), (False, True), (1, 2))
ALL_SIMULATED = [*(cell for cell in CELLS if cell.name in MOST), *(cell_of(name, ALL) for name in TINY)]
WHOLE = [name.removeprefix("one-layer ") for name in MODELS]
PRODUCT = [cell_of(*of) for of in itertools.product(WHOLE + RARE, EVERY_WAY)]


def test_each_option_meets_each_model_and_each_mesh() -> None:
    for model in MODELS:
        mine = [c.options for c in CELLS if c.name == model]
        assert {o.zero for o in mine} == {0, 3} and {o.micro_batches for o in mine} == {1, 2}
        assert len({o.sequence_parallel for o in mine}) == (1 if model in WITHOUT_SEQUENCE else 2)
        assert len({tuple(c.mesh.sizes) for c in CELLS if c.name == model}) == 3
    for mesh in map(Mesh.parse, MESHES):
        mine = [c.options for c in CELLS if c.mesh == mesh]
        assert {o.micro_batches for o in mine} == {1, 2}
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

"""Every schedule on every kind of mesh: loss and all gradients of whole models equal one process, on real ranks.

Three of the models run with ``-m full`` only."""

from __future__ import annotations

import pytest

from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.schedule.request import SCHEDULES
from tests.pipeline_cases import Case, prepare, run_case

MODELS = ("llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt2", "vit", "t5")), "bert")
MESHES = {
    "pp2": (Mesh.of(pp=2), {}),
    "pp4": (Mesh.of(pp=4), {}),
    "pp2-dp2": (Mesh.of(pp=2, dp=2), {}),
    "pp2-dp2-zero3": (Mesh.of(pp=2, dp=2), {"zero": 3}),
    "pp2-tp2": (Mesh.of(pp=2, tp=2), {}),
}
SEQUENCE = {"pp2-tp2-sequence": (Mesh.of(pp=2, tp=2), {"sequence_parallel": True})}
SLICED = [name for name, entry in SCHEDULES.items() if entry.sliced]
# (model, mesh, slices): causal models, even and uneven slices, sliding windows, grouped and single key heads
SLICES = [
    ("llama", "pp2", (7, 5, 4)),
    ("llama", "pp4", 4),
    ("llama", "pp2-dp2", 2),
    ("llama", "pp2-dp2-zero3", (3, 9, 4)),
    ("llama", "pp2-tp2", (7, 5, 4)),
    ("llama", "pp2-tp2-sequence", (6, 10)),
    ("gpt2", "pp2", 4),
    ("gpt2", "pp4", (1, 12, 3)),
    ("gpt2", "pp2-tp2", 2),
    ("gemma3", "pp2", (7, 5, 4)),
]
WHOLE = [name for name, entry in SCHEDULES.items() if not entry.sliced]


def case(model: str, mesh: str, chunks: int) -> Case:
    sizes, more = MESHES[mesh]
    ranks = sizes.size("pp")
    base = "1f1b" if chunks == 1 else "interleaved"
    options = Options(micro_batches=2 * ranks, schedule=base, chunks=chunks, **more)
    return Case(model, sizes, options, rows=2 * ranks * sizes.size("dp"))


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    prepare([case(request.param, mesh, chunks) for mesh in MESHES for chunks in (1, 2)])
    return str(request.param)


def check(case: Case, names: list[str]) -> None:
    for name, found in run_case(case, names).items():
        for rank, of_rank in enumerate(found):
            assert of_rank.loss < 1e-10, (name, rank, of_rank)
            assert of_rank.gradient < 1e-10, (name, rank, of_rank)
            assert not of_rank.odd, (name, rank)


@pytest.mark.parametrize("chunks", (1, 2))
@pytest.mark.parametrize("mesh", MESHES)
def test_all_schedules(model: str, mesh: str, chunks: int) -> None:
    check(case(model, mesh, chunks), [name for name in WHOLE if SCHEDULES[name].chunks == chunks])


def sliced_case(model: str, mesh: str, slices: int | tuple[int, ...]) -> Case:
    sizes, more = (MESHES | SEQUENCE)[mesh]
    options = Options(micro_batches=2, schedule="seq1f1b", slices=slices, **more)
    return Case(model, sizes, options, rows=2 * sizes.size("dp"))


@pytest.mark.parametrize(("model_name", "mesh", "slices"), SLICES)
def test_token_slices(model_name: str, mesh: str, slices: int | tuple[int, ...]) -> None:
    check(sliced_case(model_name, mesh, slices), SLICED)

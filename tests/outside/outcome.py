"""What becomes of another library's model on a mesh: exact, or refused. Anything else is an error.

outcome("timm swin", "tp")   ->   Outcome("exact", 0.9)        0.9 of the parameters are sharded on tp
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.options import Options
from autopar.steps.graphs import Compiled
from autopar.testing.harness import MeshRun
from tests.outside.all_models import MODELS
from tests.support.cases import Cell, called, check, compiled
from tests.support.subjects import SEED, SPECIAL, STATIC_INPUTS, subject

SPECIAL.update({name: model.make for name, model in MODELS.items()})
STATIC_INPUTS.update({name: model.static_inputs for name, model in MODELS.items()})

MESHES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "tp": ({"dp": 2, "tp": 2}, {"zero": 3}),
    "cp": ({"cp": 2}, {}),
    "pp": ({"pp": 2}, {"microbatches": 2}),
    "ep": ({"ep": 2}, {}),
}
MEET = "microbatches: samples of different microbatches meet"
TITLES = {"tp": "dp=2, tp=2, zero=3", "cp": "cp=2", "pp": "pp=2, microbatches=2", "ep": "ep=2"}


@dataclass(frozen=True)
class Outcome:
    """``words`` of a refusal; else the share of all parameters that is sharded on tp. ``parts``: microbatches, where
    samples meet in the model, so that it is given the batch in one."""

    words: str = ""
    share: float = 0.0
    parts: int = 0


def meshes_of(name: str) -> list[str]:
    """The meshes that a model is tried on: cp where there are tokens to cut, ep where there are experts."""
    model = MODELS[name]
    return [mesh for mesh in MESHES if {"cp": model.tokens, "ep": model.experts}.get(mesh, True)]


def outcome(name: str, mesh: str) -> Outcome:
    """Raises AssertionError for wrong numbers, and whatever is no refusal."""
    (sizes, options), static_inputs = MESHES[mesh], MODELS[name].static_inputs
    found = _outcome(Cell(name, Mesh.of(**sizes), Options(static_inputs=static_inputs, **options)))
    if "microbatches" in options and found.words.startswith(MEET):
        return dataclasses.replace(
            _outcome(Cell(name, Mesh.of(**sizes), Options(static_inputs=static_inputs))), parts=1
        )
    return found


def _outcome(cell: Cell) -> Outcome:
    try:
        made = compiled(cell)
    except ValueError as error:
        return Outcome(_words(error))
    if "pp" in cell.mesh.sizes:
        check(called(cell))
        return Outcome()
    known = subject(cell.name)
    run = MeshRun(made, known.model, known.batch, cell.mesh, SEED)
    check(run.errors(known.expected))
    assert not run.wrong_buffers(known.expected)
    return Outcome(share=_share(made))


def _share(made: Compiled) -> float:
    """Of the entries of all parameters, those that are sharded on tp."""
    sizes = [(math.prod(s.shape), isinstance(s.placements.get("tp"), Shard)) for s in made.parameters]
    return sum(n for n, cut in sizes if cut) / max(1, sum(n for n, _ in sizes))


def _words(error: ValueError) -> str:
    """One line, without the folders that packages lie in."""
    text = str(error)
    assert re.match(r"\w[\w ]*: ", text), f"not a refusal: {error!r}"
    return re.sub(r"/\S*/(\w+/\w+\.py)", r"\1", " ".join(text.split()))

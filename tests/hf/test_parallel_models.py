"""Whole models on real gloo ranks: loss and every gradient equal those of one process, on every mesh.

Each model meets one mesh of dp, one of tp and one of both, in turn of 2 and of 4 ranks; the options rotate, such that
each value of each option meets each model and each mesh. ``pytest -m full`` runs the whole product instead.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.hf.parallel import check

MODELS = [
    "llama", "llama_mha", "llama_tied", "gpt2", "qwen3", "gemma3", "phi3", "opt", "bert", "t5", "bart", "vit",
    "whisper", "mixtral", "qwen3_moe", "cnn", "mlp",
]  # fmt: skip
MESHES: list[dict[str, int]] = [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 4}, {"dp": 4}]
# These have no sequence that could be cut over tp.
WITHOUT_SEQUENCE = {"cnn", "mlp"}


def rotated(model: int) -> list[tuple[dict[str, int], dict[str, Any]]]:
    """The meshes of a model, by its number, and the options on each."""
    size, zero, sequence, micro = 2 + 2 * (model % 2), 3 * (model // 2 % 2), model // 4 % 2 == 1, 1 + model // 2 % 2
    return [
        ({"dp": size}, {"zero": zero, "sequence_parallel": False, "micro_batches": micro}),
        ({"tp": size}, {"zero": 0, "sequence_parallel": sequence, "micro_batches": 3 - micro}),
        ({"dp": 2, "tp": 2}, {"zero": 3 - zero, "sequence_parallel": not sequence, "micro_batches": 1 + model % 2}),
    ]


def possible(model: str, mesh: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    """Without what says nothing on this mesh or cannot be for this model."""
    out = dict(options)
    if "tp" not in mesh or model in WITHOUT_SEQUENCE:
        out["sequence_parallel"] = False
    if "dp" not in mesh:
        out["zero"] = 0
    return out


def label(mesh: dict[str, int], options: dict[str, Any]) -> str:
    sp = "-sp" if options["sequence_parallel"] else ""
    zero = "-zero3" if options["zero"] else ""
    return "".join(f"{a}{n}" for a, n in mesh.items()) + zero + sp + f"-mb{options['micro_batches']}"


def cases() -> list[tuple[str, dict[str, int], dict[str, Any]]]:
    return [(name, mesh, possible(name, mesh, o)) for i, name in enumerate(MODELS) for mesh, o in rotated(i)]


def labelled() -> list[Any]:
    return [pytest.param(m, mesh, o, id=f"{m}-{label(mesh, o)}") for m, mesh, o in cases()]


def product() -> list[Any]:
    out = {}
    for model, mesh in itertools.product(MODELS, MESHES):
        for zero, sequence, micro in itertools.product((0, 3), (False, True), (1, 2)):
            options = possible(model, mesh, {"zero": zero, "sequence_parallel": sequence, "micro_batches": micro})
            name = f"{model}-{label(mesh, options)}"
            out[name] = pytest.param(model, mesh, options, id=name)
    return list(out.values())


def test_each_option_meets_each_model_and_each_mesh() -> None:
    for model in MODELS:
        mine = [o for m, _, o in cases() if m == model]
        assert {o["zero"] for o in mine} == {0, 3} and {o["micro_batches"] for o in mine} == {1, 2}
        assert len({o["sequence_parallel"] for o in mine}) == (1 if model in WITHOUT_SEQUENCE else 2)
    for mesh in MESHES:
        mine = [o for _, m, o in cases() if m == mesh]
        assert {o["micro_batches"] for o in mine} == {1, 2}
        assert len({o["zero"] for o in mine}) == (2 if "dp" in mesh else 1)
        assert len({o["sequence_parallel"] for o in mine}) == (2 if "tp" in mesh else 1)


@pytest.mark.parametrize("model, mesh, options", labelled())
def test_equals_one_process(model: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    check(model, mesh, **options)


@pytest.mark.full
@pytest.mark.parametrize("model, mesh, options", product())
def test_equals_one_process_with_all_options(model: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    check(model, mesh, **options)

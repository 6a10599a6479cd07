"""Models of other libraries on meshes: exact in float64 (loss, all gradients, buffers), or refused in known words.

The libraries are an extra of their own ("outside"); what needs one that is not there says so.
"""

from __future__ import annotations

import re

import pytest

from tests.outside.known import REFUSED
from tests.outside.outcome import MESHES, meshes_of, outcome
from tests.outside.page import PAGE, rows_of_page
from tests.outside.zoo_of_others import MODELS

# Plain torch, of the kinds that rules of their own are for.
ALWAYS = (
    "plain UNet",
    "plain graph network",
    "plain image in text",
    "plain DLRM",
    "plain parallel block",
    "ideas set transformer",
    "ideas masked modelling",
)
CASES = [(name, mesh) for name in MODELS for mesh in meshes_of(name)]
OFTEN = [(name, meshes_of(name)[(i - 1) % len(meshes_of(name))]) for i, name in enumerate(ALWAYS)]


def test_these_models_meet_each_mesh() -> None:
    """Those on ep are of libraries."""
    assert [name for name, _ in OFTEN] == [*ALWAYS] and {mesh for _, mesh in OFTEN} == {*MESHES} - {"ep"}


@pytest.mark.parametrize(
    "name, mesh", [case if case in OFTEN else pytest.param(*case, marks=pytest.mark.full) for case in CASES]
)
def test_exact_or_refused(name: str, mesh: str) -> None:
    if MODELS[name].needs:
        pytest.importorskip(MODELS[name].needs)
    found, pattern = outcome(name, mesh), REFUSED.get((name, mesh), REFUSED.get((name, "all")))
    if pattern is None:
        assert not found.words
    else:
        assert re.search(pattern, found.words), found.words


def test_known_refusals_are_of_models_and_few() -> None:
    assert all(name in MODELS and mesh in (*MESHES, "all") for name, mesh in REFUSED)
    assert len({name for name, _ in REFUSED}) <= len(MODELS) / 10


def test_the_page_has_every_model() -> None:
    rows = rows_of_page(PAGE.read_text(encoding="utf-8"))
    assert set(rows) == set(MODELS), "docs/models.md is out of date: run python -m tests.outside.page"
    for name, row in rows.items():
        refused = any(of == name for of, _ in REFUSED)
        assert ("refused" in row) == refused, f"docs/models.md says of {name}: {row}"

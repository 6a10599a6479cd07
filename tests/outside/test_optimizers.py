"""Optimizers of other libraries on meshes: five steps are those of one process in float64, or refused by name."""

from __future__ import annotations

import pytest

from tests.outside.optimizer_page import AT_ONCE, PAGE, rows_of_page
from tests.outside.optimizers import MESHES, NAMES, outcomes

# They need a graph of the gradients, or hide their groups.
REFUSED = {
    "pytorch_optimizer adahessian",
    "pytorch_optimizer sophiah",
    "pytorch_optimizer magma",
    "torch_optimizer Adahessian",
}


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("at", range(0, len(NAMES), AT_ONCE))
def test_exact_or_refused(at: int, mesh: str) -> None:
    names = NAMES[at : at + AT_ONCE]
    for library in {name.partition(" ")[0] for name in names}:
        pytest.importorskip(library)
    for name, found in outcomes(names, mesh).items():
        assert bool(found.words) == (name in REFUSED), (name, found.words)


def test_the_page_has_every_optimizer() -> None:
    rows = rows_of_page(PAGE.read_text(encoding="utf-8"))
    assert set(rows) == set(NAMES), "docs/optimizers.md is out of date: run python -m tests.outside.optimizer_page"
    assert {name for name, row in rows.items() if "needs one that steps" in row} == REFUSED

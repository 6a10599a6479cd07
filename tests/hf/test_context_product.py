"""Sequences sharded on ranks: every model on every mesh with every algorithm, each compiled by its own name. Run it
with ``-m full``; tests/attention/test_context_models.py runs a part in which every pair of them occurs."""

from __future__ import annotations

import itertools

import pytest

from autopar.attention.algorithm_table import ALGORITHMS
from tests.attention.test_context_models import BIASED, CIRCULATING_QUERIES, MESHES, MODELS, SAME_GRAPH, cell_of
from tests.support.cases import Cell, check_ran, compile_cell, ran

NAMES = list(dict.fromkeys([*SAME_GRAPH, *(name for name, _ in ALGORITHMS.items()), "auto"]))


def possible(cell: Cell) -> bool:
    name = cell.options.attention
    return (name != "hybrid" or str(cell.mesh) == "cp=4") and (
        cell.name not in BIASED or name not in CIRCULATING_QUERIES
    )


CELLS = [cell_of(*of) for of in itertools.product(MODELS, MESHES, NAMES)]


@pytest.mark.full
@pytest.mark.parametrize("cell", [cell for cell in CELLS if possible(cell)], ids=str)
def test_equals_one_process(cell: Cell) -> None:
    check_ran(ran(cell))


@pytest.mark.full
@pytest.mark.parametrize("refused", [cell for cell in CELLS if not possible(cell)], ids=str)
def test_refused(refused: Cell) -> None:
    with pytest.raises(ValueError, match=r'^context_parallel: attention "(hybrid|token_ring)": '):
        compile_cell(refused)

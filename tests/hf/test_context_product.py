"""Sequences cut over ranks: every model on every mesh with every algorithm, each compiled by its own name. Run it with
``-m full``; tests/test_context_models.py runs a part in which every pair of them occurs."""

from __future__ import annotations

import itertools

import pytest

from autopar.attention.algorithm_table import ALGORITHMS
from tests.context_cases import SAME_GRAPH, check, compile_case
from tests.test_context_models import BIASED, CIRCULATING_QUERIES, MESHES, MODELS, case

NAMES = list(dict.fromkeys([*SAME_GRAPH, *(name for name, _ in ALGORITHMS.items()), "auto"]))


def refused(model: str, mesh: str, name: str) -> bool:
    return (name == "hybrid" and mesh != "cp4") or (model in BIASED and name in CIRCULATING_QUERIES)


@pytest.mark.full
@pytest.mark.parametrize(("model", "mesh", "name"), list(itertools.product(MODELS, MESHES, NAMES)))
def test_equals_one_process(model: str, mesh: str, name: str) -> None:
    this = case(model, mesh, name)
    if refused(model, mesh, name):
        with pytest.raises(ValueError, match=r'^context_parallel: attention "(hybrid|token_ring)": '):
            compile_case(this)
    else:
        check(this, [""])

"""TRL's trainers on meshes: the losses, norms and metrics of plain runs over five steps."""

from __future__ import annotations

import pytest

from tests.outside.trl_trainers import CASES, outcome

CLOSE = 1e-5  # in float32
REFUSED: dict[tuple[str, str], str] = {}
ALL = [(name, mesh) for name, case in CASES.items() for mesh in case.meshes]


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh"), ALL)
def test_logs_are_those_of_a_plain_run(name: str, mesh: str) -> None:
    pytest.importorskip("trl")
    words, worst = outcome(name, mesh)
    assert bool(words) == ((name, mesh) in REFUSED) and REFUSED.get((name, mesh), "") in words, words
    assert worst < CLOSE

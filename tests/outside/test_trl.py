"""TRL's trainers on meshes: the losses, norms and metrics of plain runs over five steps."""

from __future__ import annotations

import pytest

from tests.outside.trl_trainers import CASES, MESHES, outcome

CLOSE = 1e-5  # in float32
REFUSED = {
    **{("DPO, LoRA", mesh): "would take its reference from the model with disabled adapters" for mesh in MESHES},
    ("SFT, packing", "dp=2, zero=3"): "found max_length_q",  # a constant, in each rank another
}


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_logs_are_those_of_a_plain_run(name: str, mesh: str) -> None:
    pytest.importorskip("trl")
    words, worst = outcome(name, mesh)
    assert bool(words) == ((name, mesh) in REFUSED) and REFUSED.get((name, mesh), "") in words, words
    assert worst < CLOSE

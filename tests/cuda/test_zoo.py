"""Types of transformers in training loops on fake CUDA tensors, with dropout (`test_module` has some always)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.models.tiny import TINY
from tests.cuda.loops import check_loop, in_type
from tests.hf.zoo import CAUSAL, WITHOUT_ATTENTION, make
from tests.support.subjects import tiny

WAYS: dict[str, dict[str, Any]] = {
    "dp=2": {"zero": 3, "microbatches": 2},
    "tp=2": {"sequence_parallel": True},
    "cp=2": {},
}
RATES = {"diffllama": 0.0, "xlm": 0.0}  # diffllama refuses others; over cp, xlm does: rows whose keys are all masked
ALL = [
    (kind, mesh)
    for kind in (*TINY, *(kind for kind in CAUSAL if kind not in TINY), *WITHOUT_ATTENTION)
    for mesh in WAYS
    if mesh != "cp=2" or kind != "vit"
]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "mesh"), ALL)
def test_a_training_loop(kind: str, mesh: str) -> None:
    rate = RATES.get(kind, 0.1)
    made = tiny(kind, dropout=rate) if kind in TINY else make(kind, "causal", rate)
    check_loop(*in_type(*made, torch.bfloat16), mesh, WAYS[mesh])

"""Every step on fake CUDA tensors: no two devices meet, nothing waits for the device, results are on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.capture.front_end import capture
from autopar.compile.model import compile_graph
from autopar.ir.graph import copy_graph
from autopar.ir.mesh import Mesh
from autopar.options import Options
from tests.cuda.fake_gpu import fake_gpu
from tests.cuda.loops import in_type
from tests.support.subjects import tiny

CELLS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "dp=2", {"microbatches": 2}),
    ("llama", "dp=2,tp=2", {"zero": 3, "sequence_parallel": True}),
    ("llama", "pp=2", {"microbatches": 4}),
    ("llama", "pp=2", {"microbatches": 2, "schedule": "seq1f1b", "token_slices": (7, 9)}),
    ("llama", "cp=2", {"attention": "ring"}),
    ("llama", "cp=2", {"attention": "token_ring", "cp_load_balance": "zigzag"}),
    ("llama", "cp=2", {"attention": "ulysses"}),
    ("gpt2", "tp=2", {}),
    ("gpt2", "pp=2", {"microbatches": 2, "schedule": "zb_h1"}),
    ("t5", "tp=2", {}),
    ("t5", "pp=2", {"microbatches": 2}),
    ("bert", "dp=2", {}),
    ("mixtral", "dp=2", {}),
    ("mixtral", "tp=2", {}),
    ("gpt_oss", "dp=2", {}),
    ("whisper", "dp=2,tp=2", {}),
]


FEW = (1, 8, 9)  # loops of `test_module` have cp, and experts


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [pytest.param(*cell, marks=() if i in FEW else pytest.mark.full) for i, cell in enumerate(CELLS)],
    ids=str,
)
def test_a_step(name: str, mesh: str, options: dict[str, Any]) -> None:
    model, batch = in_type(*tiny(name, 2 if "pp" in mesh else 1, dropout=0.1), torch.bfloat16)
    compiled = compile_graph(copy_graph(capture(model, batch)), Mesh.parse(mesh), Options(**options), outputs=())
    with fake_gpu(compiled.plan.mesh.world_size) as gpu:
        result = gpu.step(compiled, model, batch)
    found = {x.device for x in (*result.gradients.values(), *result.losses)}
    assert found == {torch.device("cuda", 0)}
    assert not gpu.copies

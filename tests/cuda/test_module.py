"""A training loop on fake CUDA tensors, as users write it: which copies a steady step makes, and that none waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from tests.cuda.fake_gpu import FakeGpu, fake_gpu, module_on

CUDA = torch.device("cuda", 0)
CELLS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "dp=2", {"zero": 3}),
    ("llama", "pp=2", {"micro_batches": 2}),
    ("llama", "cp=2", {"attention": "ring"}),
    ("llama", "tp=2", {"sequence_parallel": True}),
    ("gpt2", "dp=2,tp=2", {"micro_batches": 2}),
    ("mixtral", "dp=2", {}),
    ("mixtral", "tp=2", {}),
]


def copies(gpu: FakeGpu) -> dict[str, int]:
    """By way and file, since the last call."""
    found: dict[str, int] = {}
    for line, count in gpu.copies.items():
        what = line.partition(": ")[0] + " in " + line.partition(": ")[2].partition(":")[0]
        found[what] = found.get(what, 0) + count
    gpu.copies.clear()
    return found


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [pytest.param(*cell, marks=() if i == 0 else pytest.mark.full) for i, cell in enumerate(CELLS)],
    ids=str,
)
def test_a_training_loop(name: str, mesh: str, options: dict[str, Any]) -> None:
    model = TINY[name].build(dtype=torch.bfloat16, dropout=0.1)
    sizes = dict(Mesh.parse(mesh).axes)
    batch = {k: x.bfloat16() if x.is_floating_point() else x for k, x in TINY[name].batch(4, 16).items()}
    with (
        fake_gpu(Mesh.parse(mesh).world_size) as gpu,
        module_on(gpu, model, batch, autopar.init_mesh("cuda", **sizes), **options) as parallel,
    ):
        optimizer = torch.optim.AdamW(parallel.parameters())
        step(gpu, parallel, optimizer, batch)
        found = step(gpu, parallel, optimizer, batch)
        assert found.pop("cpu to cuda in batches.py") == len(batch)
        assert set(found) <= {"cuda to cpu in note_watch.py"} and sum(found.values()) <= 1
        parallel.eval_step(**batch)
        assert not any("waiting" in what for what in copies(gpu))
        assert {x.device for x in (*parallel.parameters(), *parallel.buffers())} == {CUDA}


def step(gpu: FakeGpu, parallel: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> dict[str, int]:
    """Forward, backward, clipping and the optimizer: what is copied meanwhile."""
    copies(gpu)
    assert parallel.train_step(**batch).device == CUDA  # type: ignore[operator]
    assert parallel.clip_grad_norm_(1.0).device == CUDA  # type: ignore[operator]
    optimizer.step()
    optimizer.zero_grad()
    return copies(gpu)

"""A training loop on fake CUDA tensors, as users write it: a steady step copies its batch, and waits for nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.ir.mesh import Mesh
from tests.cuda.fake_gpu import FakeGpu, fake_gpu, module_on

CUDA = torch.device("cuda", 0)


def in_type(model: nn.Module, batch: dict[str, Tensor], dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Module.to(model, dtype), {k: x.to(dtype) if x.is_floating_point() else x for k, x in batch.items()}


def copies(gpu: FakeGpu) -> dict[str, int]:
    """By way and file, since the last call."""
    found: dict[str, int] = {}
    for line, count in gpu.copies.items():
        what = line.partition(": ")[0] + " in " + line.partition(": ")[2].partition(":")[0]
        found[what] = found.get(what, 0) + count
    gpu.copies.clear()
    return found


def check_loop(model: nn.Module, batch: dict[str, Tensor], mesh: str, options: dict[str, Any], **gpu: Any) -> None:
    """Two training steps with a batch on the host, two with one on the GPU, one without gradients, and a forward and
    its backward where there is one."""
    sizes = dict(Mesh.parse(mesh).axes)
    with (
        fake_gpu(Mesh.parse(mesh).world_size, **gpu) as there,
        module_on(there, model, batch, autopar.init_mesh("cuda", **sizes), **options) as parallel,
    ):
        optimizer = torch.optim.AdamW(parallel.parameters())
        step(there, parallel, optimizer, batch)
        check_copies(step(there, parallel, optimizer, batch), len(batch))
        here = {k: x.to(CUDA) for k, x in batch.items()}  # as many loops have it
        step(there, parallel, optimizer, here)
        check_copies(step(there, parallel, optimizer, here), 0)
        parallel.eval_step(**batch)  # compiles, and sends its constants
        copies(there)
        parallel.eval_step(**batch)
        if "pp" not in sizes and "microbatches" not in options:
            check_copies(copies(there), len(batch))
            parallel(**batch).loss.backward()
            copies(there)
            parallel(**batch).loss.backward()
        check_copies(copies(there), len(batch))
        assert {x.device for x in (*parallel.parameters(), *parallel.buffers())} == {CUDA}


def check_copies(found: dict[str, int], batch: int) -> None:
    """Of a step: its batch, and back what kernels noted and the words of a batch on the GPU; none waits."""
    assert found.pop("cpu to cuda in host_copies.py", 0) == batch
    assert found.pop("cuda to cpu in host_copies.py", 0) <= 2
    assert not found


def step(gpu: FakeGpu, parallel: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> dict[str, int]:
    """Forward, backward, clipping and the optimizer: what is copied meanwhile."""
    copies(gpu)
    assert parallel.train_step(**batch).device == CUDA  # type: ignore[operator]
    assert parallel.clip_grad_norm_(1.0).device == CUDA  # type: ignore[operator]
    optimizer.step()
    optimizer.zero_grad()
    return copies(gpu)

"""Batches on their way to a GPU: in pinned memory, once, and nobody waits."""

from __future__ import annotations

import torch

from autopar.runtime.mesh.host_copies import to_device
from tests.cuda.fake_gpu import Moves, fake_gpu, pinned

CUDA = torch.device("cuda", 0)


def test_the_host_does_not_wait_for_a_batch() -> None:
    with fake_gpu(world=1) as gpu, gpu, Moves():
        rows = torch.ones(4, 6)
        for x in (rows, pinned(rows), rows.t()):
            moved = to_device(x, CUDA)
            assert moved.device == CUDA and moved.is_contiguous() and moved.shape == x.shape
        assert [(line.partition(":")[0], count) for line, count in gpu.copies.items()] == [("cpu to cuda", 3)]
        there = torch.ones(4, device=CUDA)
        assert to_device(there, CUDA) is there

"""Reduce-scatters of gradients: waited for in time, so that few gradients are whole at a time."""

from __future__ import annotations

import re
import weakref
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.adapters.distributed import REDUCE_SCATTER
from autopar.ir.placement import Shard, piece
from autopar.runtime.exec.lowering import bind
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from tests.runtime.test_bind import aten, graph_of, raw
from tests.support.ranks import run_ranks

GRADIENTS = (8, 2, 8, 4, 4, 8)  # rows


def backward(call: Any, *activations: Any) -> list[Any]:
    """Gradients as a backward makes them: each is reduce-scattered, and leaves at the end."""
    found = []
    for x in activations:
        whole = call(aten.mul.Tensor, x, x)
        found.append(call(raw.reduce_scatter.default, whole, 0, [], "tp", 2))
    return found


class KeepsUntilWaited:
    """A collective that keeps what it was given until somebody waits for it, as NCCL does."""

    alive: ClassVar[list[weakref.ref[Tensor]]] = []
    most: ClassVar[int] = 0

    def __init__(self, work: Any, given: Tensor) -> None:
        self.work, self.given = work, given
        KeepsUntilWaited.alive.append(weakref.ref(given))
        rows = sum(x.numel() for ref in self.alive if (x := ref()) is not None)
        KeepsUntilWaited.most = max(self.most, rows)

    def wait(self) -> None:
        self.work.wait()
        del self.given


def scattered() -> tuple[str, int, bool]:
    """On a rank: the code, the most numbers that reduce-scatters keep at a time, and whether gradients are right."""
    groups, real = Groups(init_mesh(tp=2)), getattr(dist, REDUCE_SCATTER)
    bound = bind(graph_of([(rows, 3) for rows in GRADIENTS], backward), groups)
    inputs = [
        torch.rand(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)) for rows in GRADIENTS
    ]
    expected = [2 * piece(x * x, Shard(0), 2, dist.get_rank()) for x in inputs]

    def kept(out: Tensor, given: Tensor, **kwargs: Any) -> KeepsUntilWaited:
        return KeepsUntilWaited(real(out, given, **kwargs), given)

    setattr(dist, REDUCE_SCATTER, kept)
    try:
        found = bound(list(inputs))
    finally:
        setattr(dist, REDUCE_SCATTER, real)
    return bound.code, KeepsUntilWaited.most, all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_reduce_scatters_keep_no_more_than_two_gradients() -> None:
    """Beside the one that starts, and of the largest."""
    code, most, right = run_ranks(2, scattered)[0]
    calls = re.findall(r" = autopar_runtime_comm_collectives_([a-z]+)", code)
    words = "".join({"start": "S", "finish": "F"}[call] for call in calls)
    assert words == "SSSFSSFSFFFF"
    assert right and most == 3 * (8 + 4 + 4 + 8) <= 3 * 3 * max(GRADIENTS)

"""Links and a device slower than this machine: what overlaps with what is then measured on any number of cores.

    with SlowMesh(groups, options) as slow:
        executor = Executor(compiled, groups)
        executor.run_step(values)
    slow.seconds, slow.exposed[axis]

Real ranks run the real step. A kernel takes ``slower`` times the seconds of `autopar.cost.flops.node_seconds`, a
collective those of `autopar.cost.hardware.Links`. Each axis has one link, a token bucket: a transfer starts when all
ranks have started it (they tell each other) and the link is free, and `finish` returns no earlier than it ends.

A rank keeps its own time, ``seconds``. With ``sleep`` it also waits until so much time has passed, so that a stopwatch
shows the same; without, a step takes no longer than its arithmetic, and a busy machine changes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.fx import Node

from autopar.cost.flops import is_free, node_seconds
from autopar.cost.hardware import Links, device_of
from autopar.ir.traffic import collective_bytes
from autopar.options import Options
from autopar.runtime.comm.collectives import Collective, PendingCollective
from autopar.runtime.exec import lowering
from autopar.runtime.exec.executor import Executor
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from tests.support.cases import Cell, inherited, values_of


@dataclass
class SlowMesh:
    """seconds: of this rank so far. computed: of these, in kernels. exposed: axis -> of these, waiting for a
    transfer. moved: axis -> seconds of its transfers."""

    groups: Groups
    options: Options
    slower: float = 1.0
    sleep: bool = False
    seconds: float = 0.0
    computed: float = 0.0
    exposed: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    _last: dict[str, Transfer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = device_of(self.options)
        self.links = Links.of(self.options, self.groups.mesh)
        self._begun = time.perf_counter()

    def __enter__(self) -> Self:
        other, launch = lowering._Eager.other, Collective.launch

        def computes(eager: Any, node: Node, new: Node) -> None:
            other(eager, node, new)
            took = 0.0 if is_free(node) else node_seconds(node, self.device) * self.slower
            if node.op == "call_function" and took:
                new.graph.call_function(self.compute, (took,))

        def starts(collective: Collective, *args: Any, **kwargs: Any) -> PendingCollective:
            pending = launch(collective, *args, **kwargs)
            pending.work = self._start(collective, pending)  # type: ignore[assignment]
            return pending

        self._patches = [
            patch.object(lowering._Eager, "other", computes),
            patch.object(Collective, "launch", starts),
        ]
        for one in self._patches:
            one.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for one in self._patches:
            one.stop()

    def reset(self) -> None:
        """Start at zero; nothing may be on its way."""
        self.seconds = self.computed = 0.0
        self.exposed, self.moved, self._last = Counter(), Counter(), {}
        self._begun = time.perf_counter()

    def compute(self, seconds: float) -> None:
        """Run a kernel."""
        self.computed += seconds
        self._until(self.seconds + seconds)

    def wait(self, axis: str, end: float) -> None:
        """Until a transfer is over."""
        self.exposed[axis] += max(end - self.seconds, 0.0)
        self._until(max(end, self.seconds))

    def _until(self, seconds: float) -> None:
        self.seconds = seconds
        left = self._begun + seconds - time.perf_counter()
        if self.sleep and left > 0:
            time.sleep(left)

    def _start(self, collective: Collective, pending: PendingCollective) -> Transfer:
        axis, kind = collective.axis, collective.kind
        sent = _sent(kind, pending, self.groups.size(axis))
        took = self.links.seconds(axis, kind, sent) * self.slower
        self.moved[axis] += took
        begun = torch.tensor(self.seconds, dtype=torch.float64)
        told = dist.all_reduce(begun, dist.ReduceOp.MAX, group=self.groups.group(axis), async_op=True)
        self._last[axis] = Transfer(self, axis, took, pending.work, begun, told, self._last.get(axis))
        return self._last[axis]


@dataclass
class Transfer:
    """The work of a collective, and when all ranks had started it."""

    mesh: SlowMesh
    axis: str
    took: float
    work: dist.Work
    begun: torch.Tensor
    told: Any
    before: Transfer | None  # over the same link
    _end: float = -1.0

    @property
    def end(self) -> float:
        """When it is over."""
        if self._end < 0:
            self.told.wait()
            free = self.before.end if self.before is not None else 0.0
            self.before = None
            self._end = max(float(self.begun), free) + self.took
        return self._end

    def wait(self) -> None:
        """As `dist.Work.wait`."""
        self.work.wait()
        self.mesh.wait(self.axis, self.end)


def slow_step(cell: Cell) -> tuple[float, float, float, float]:
    """Seconds of a step of a rank on slow links, of its kernels, of its transfers, and those in which it waits."""
    groups, made = Groups(init_mesh("cpu", 30.0, **cell.mesh.sizes)), inherited(cell)
    with SlowMesh(groups, cell.options) as slow:
        executor = Executor(made, groups)
        values = values_of(made, cell.name, groups)
        executor.run_step(values)
        dist.barrier()
        slow.reset()
        executor.run_step(values)
    return slow.seconds, slow.computed, sum(slow.moved.values()), sum(slow.exposed.values())


def _sent(kind: str, pending: PendingCollective, ranks: int) -> int:
    """Bytes that a rank sends."""
    size = pending.buffer.nbytes
    if kind in ("all_reduce", "all_gather"):
        return collective_bytes(kind, size, ranks)
    if kind == "send":
        return size
    return collective_bytes(kind, size * ranks, ranks)

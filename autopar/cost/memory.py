"""Memory of one rank: bytes of parameters, gradients, optimizer states and activations, from the step graphs.

    steady    parameters + buffers + inputs + optimizer
    F         saved values and temporaries while they are alive              \\
    B         saved values until their last use, gradients once computed      } the peak of a step is in one of them
    between   accumulated gradients of earlier microbatches                  /

Activations are counted by walking a graph in the order in which it runs (`autopar.ir.storages`); with pipeline stages,
all graphs of a rank in the order of its actions (`autopar.cost.stage_memory`). The numbers are what the graphs
allocate, without the overhead of a device's allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.cost.stage_memory import walk_rank
from autopar.ir.graph import placeholders
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.ir.signature import ParameterSpec, in_buckets
from autopar.ir.storages import bytes_of
from autopar.options import Options
from autopar.steps.graphs import Compiled
from autopar.steps.of_rank import graphs_of_all, shared_gradients

# Floating states of AdamW per element: the two moments.
_MOMENTS = 2


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    parameters: stored shards of all parameters. buffers: buffers and constants. inputs: its shard of a step's batch.
    gradients: one per trainable parameter that the loss depends on, with its placement and dtype.
    optimizer: AdamW, see `optimizer_bytes`.
    accumulated: with microbatches, the rank's accumulated gradients before they are reduced over ranks, replicated on
    dp; shards of those that each microbatch reduces (zero=2 and 3).
    saved: what F of one microbatch keeps for B; with pipeline stages, the most that all microbatches in flight keep.
    forward_peak, backward_peak: most bytes of live values in F and in B, with saved values and gradients, without
    ``steady``.

    gathered: parameters that stay unsharded from the first F of a step to its last B (zero=1 and 2). received, with
    pipeline stages: of ``saved``, what other ranks have sent.

    In host memory, and counted nowhere else: host: most bytes of activations; states: optimizer states, if they are
    offloaded. ``optimizer`` is then the most of them that is on the device at once during the optimizer step, when
    there are no activations.
    """

    parameters: int
    buffers: int
    inputs: int
    gradients: int
    optimizer: int
    accumulated: int
    saved: int
    forward_peak: int
    backward_peak: int
    received: int = 0
    gathered: int = 0
    host: int = 0
    states: int = 0

    @property
    def steady(self) -> int:
        """Bytes that are allocated all the time."""
        return self.parameters + self.buffers + self.inputs + (0 if self.states else self.optimizer)

    @property
    def peak(self) -> int:
        """The most bytes at once, in a step whose gradients were freed before it started."""
        stepping = self.gradients + self.optimizer if self.states else 0
        return self.steady + max(self.forward_peak, self.backward_peak, stepping)


def memory(compiled: Compiled) -> Memory:
    """The memory of one rank that trains a compiled model: AdamW, gradients freed between steps. With pipeline stages,
    that of the fullest rank; `memories` has all."""
    return max(memories(compiled), key=lambda m: m.peak)


def memories(compiled: Compiled) -> tuple[Memory, ...]:
    """The memory of a rank for every coordinate on pp; one entry without pipeline stages."""
    return tuple(_of_rank(compiled, rank) for rank in range(compiled.plan.mesh.size("pp")))


def _of_rank(compiled: Compiled, rank: int) -> Memory:
    """The memory of a rank at a coordinate of pp."""
    found = walk_rank(compiled.pipeline, rank, compiled.plan.options.precision)
    held = [p for p in compiled.parameters if rank in p.ranks]
    nodes = {s.name: s.node for s in compiled.signature.inputs if s.kind == "parameter"}
    trained = [p for p in held if p.requires_grad and nodes[p.name] in found.trained]
    bucket = compiled.plan.options.bucket_bytes
    sums = shared_gradients(compiled.pipeline, compiled.parameters, nodes, compiled.plan.mesh, rank, bucket)
    copied = sum(size for size, _, gradients in sums if gradients > 1)  # gradients that stages sum, in buckets
    return Memory(
        **_steady(compiled, held, trained),
        **_optimizer(compiled, trained),
        accumulated=found.accumulated,
        saved=found.saved,
        forward_peak=found.forward_peak,
        backward_peak=max(found.backward_peak, found.gradients + copied),
        received=found.received,
        gathered=found.gathered,
        host=found.host,
    )


def _steady(compiled: Compiled, held: Iterable[ParameterSpec], trained: Iterable[ParameterSpec]) -> dict[str, int]:
    """Bytes that do not depend on the order in which graphs run."""
    mesh, trained = compiled.plan.mesh, list(trained)
    nodes = {n.name: n for n in placeholders(compiled.local)}
    specs = {s.node: s for s in compiled.signature.inputs}
    return {
        "parameters": sum(p.nbytes(mesh) for p in held),
        "buffers": bytes_of(nodes[n] for n, s in specs.items() if s.kind in ("buffer", "constant") and n in nodes),
        "inputs": _input_bytes(compiled, {n: s.name for n, s in specs.items() if s.kind == "input"}, nodes),
        "gradients": sum(p.nbytes(mesh) for p in trained),
    }


def _optimizer(compiled: Compiled, trained: Sequence[ParameterSpec]) -> dict[str, int]:
    """Bytes of states on the device, and on the host: the optimizer step has three buckets at a time on the device."""
    mesh, options = compiled.plan.mesh, compiled.plan.options
    states = [optimizer_bytes(p, mesh) for p in trained]
    if not options.optimizer_cpu_offload:
        return {"optimizer": sum(states)}
    buckets = in_buckets([p.nbytes(mesh) for p in trained], options.bucket_bytes)
    sizes = [sum(states[i] for i in bucket) for bucket in buckets]
    return {"optimizer": max((sum(sizes[k : k + 3]) for k in range(len(sizes))), default=0), "states": sum(states)}


def optimizer_bytes(spec: ParameterSpec, mesh: Mesh) -> int:
    """`torch.optim.AdamW` on one rank's shard: two moments in the stored dtype of the parameter. 8 bytes per element of
    float32, 4 of bfloat16, 16 of float64. (Adafactor's row and column statistics of a matrix are replicated.)"""
    return _MOMENTS * spec.nbytes(mesh)


def _input_bytes(compiled: Compiled, inputs: Mapping[str, str], nodes: Mapping[str, Node]) -> int:
    """Inputs of all microbatches: a graph sees one of them."""
    count, total = compiled.plan.options.microbatches, 0
    for node, name in inputs.items():
        cut = isinstance(compiled.plan.inputs.get(name, {}).get("mb"), Shard)
        total += bytes_of([nodes[node]]) * (count if cut else 1)
    return total


def most_static(specs: Sequence[ParameterSpec], mesh: Mesh, options: Options) -> int:
    """`static_bytes` of the fullest coordinate on pp."""
    by_name = {s.name: s for s in specs}
    held = ([s.name for s in specs if r in s.ranks] for r in range(mesh.size("pp")))
    return max(static_bytes(by_name, names, mesh, options) for names in held)


def static_bytes(specs: Mapping[str, ParameterSpec], names: Sequence[str], mesh: Mesh, options: Options) -> int:
    """Parameters, gradients and optimizer states of one rank, on the device."""
    held = [specs[n] for n in names]
    return sum(p.nbytes(mesh) * (2 if p.requires_grad else 1) for p in held) + sum(
        optimizer_bytes(p, mesh) for p in held if p.requires_grad and not options.optimizer_cpu_offload
    )


# --- if routing sends a rank as many tokens as it can --------------------------------------------------


def memory_at_worst(compiled: Compiled) -> Memory | None:
    """Memory of the fullest rank; an upper bound, as no routing sends the most everywhere. None if no experts are
    sharded."""
    nodes = {n for gm in graphs_of_all(compiled.pipeline, compiled.prologue) for n in gm.graph.nodes}
    routed = [n for n in nodes if "most_rows" in n.meta]
    if not routed:
        return None
    with _with_most(routed):
        return memory(compiled)


@contextmanager
def _with_most(nodes: list[Node]) -> Iterator[None]:
    """Context manager: values have as many rows as they may have."""
    before = [node.meta["val"] for node in nodes]
    try:
        for node, val in zip(nodes, before, strict=True):
            several = isinstance(val, (tuple, list))
            found = [_of_rows(x, n) for x, n in zip(val if several else [val], node.meta["most_rows"], strict=True)]
            node.meta["val"] = type(val)(found) if several else found[0]
        yield
    finally:
        for node, val in zip(nodes, before, strict=True):
            node.meta["val"] = val


def _of_rows(x: object, rows: int | None) -> object:
    return x if rows is None or not isinstance(x, torch.Tensor) else x.new_empty((rows, *x.shape[1:]))

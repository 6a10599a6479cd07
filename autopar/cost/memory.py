"""What one rank holds: bytes of parameters, gradients, optimizer states and activations, read off the step graphs.

    steady    parameters + buffers + inputs + optimizer
    F         saved values and temporaries as they live and die          \\
    B         saved values until their last use, gradients from birth     } the peak of a step lies in one of them
    between   gradient sums of earlier microbatches                     /

Activations are counted by walking a graph as it runs (`autopar.ir.storages`), with pipeline stages all graphs of a rank
in the order of its actions (`autopar.cost.stage_memory`). It is what the graphs ask for, not what a device's allocator
reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from autopar.cost.stage_memory import walk_rank
from autopar.ir.graph import placeholders
from autopar.ir.mesh import Mesh
from autopar.ir.parameter import ParameterSpec, in_buckets
from autopar.ir.placement import Shard
from autopar.ir.storages import bytes_of
from autopar.options import Options
from autopar.steps.graphs import Compiled
from autopar.steps.of_rank import shared_gradients

# Floating states of AdamW per element: the two moments.
_MOMENTS = 2


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    parameters: stored pieces of all parameters. buffers: buffers and constants. inputs: its part of a step's batch.
    gradients: one per trainable parameter that the loss depends on, placed and typed like it.
    optimizer: AdamW, see `optimizer_bytes`.
    accumulated: with microbatches, sums of this rank's own gradients before they are reduced over ranks, whole on dp;
    of gradients that each microbatch reduces (zero=2 and 3) the pieces.
    saved: what F of one microbatch keeps for B; with pipeline stages, the most that all microbatches in flight keep.
    forward_peak, backward_peak: most bytes of live values in F and in B, saved values and gradients included, what is
    steady left out.

    gathered: parameters that are whole from the first F of a step to its last B (zero=1 and 2). With pipeline stages
    only: received: of ``saved``, what other ranks have sent.

    In host memory, and in none of the others: host: most bytes of activations; states: of the optimizer, if they lie
    there. ``optimizer`` is then what of them is on the device at once, in a step of it, when activations are gone.
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
        """What is there all the time."""
        return self.parameters + self.buffers + self.inputs + (0 if self.states else self.optimizer)

    @property
    def peak(self) -> int:
        """The most that is there at once, in a step whose gradients were freed before it started."""
        stepping = self.gradients + self.optimizer if self.states else 0
        return self.steady + max(self.forward_peak, self.backward_peak, stepping)


def memory(compiled: Compiled) -> Memory:
    """The memory of one rank that trains a compiled model: AdamW, gradients freed between steps. With pipeline stages,
    of the rank that needs most; `memories` has all."""
    return max(memories(compiled), key=lambda m: m.peak)


def memories(compiled: Compiled) -> tuple[Memory, ...]:
    """The memory of a rank for every coordinate on pp: of one where there are no pipeline stages."""
    return tuple(_of_rank(compiled, rank) for rank in range(compiled.plan.mesh.size("pp")))


def _of_rank(compiled: Compiled, rank: int) -> Memory:
    """Of a rank at a coordinate of pp."""
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
    """What does not depend on the order in which graphs run."""
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
    """Bytes of states on the device, and on the host: those of three buckets in a row come and go in a step."""
    mesh, options = compiled.plan.mesh, compiled.plan.options
    states = [optimizer_bytes(p, mesh) for p in trained]
    if not options.optimizer_cpu_offload:
        return {"optimizer": sum(states)}
    buckets = in_buckets([p.nbytes(mesh) for p in trained], options.bucket_bytes)
    sizes = [sum(states[i] for i in bucket) for bucket in buckets]
    return {"optimizer": max((sum(sizes[k : k + 3]) for k in range(len(sizes))), default=0), "states": sum(states)}


def optimizer_bytes(spec: ParameterSpec, mesh: Mesh) -> int:
    """`torch.optim.AdamW` on one rank's piece: two moments in the dtype that the parameter is stored in. 8 bytes per
    element of float32, 4 of bfloat16, 16 of float64. (Adafactor's rows and columns are whole on every rank, one row and
    one column of each matrix.)"""
    return _MOMENTS * spec.nbytes(mesh)


def _input_bytes(compiled: Compiled, inputs: Mapping[str, str], nodes: Mapping[str, Node]) -> int:
    """Inputs of all microbatches: a graph sees one of them."""
    count, total = compiled.plan.options.microbatches, 0
    for node, name in inputs.items():
        cut = isinstance(compiled.plan.inputs.get(name, {}).get("mb"), Shard)
        total += bytes_of([nodes[node]]) * (count if cut else 1)
    return total


def most_static(specs: Sequence[ParameterSpec], mesh: Mesh, options: Options) -> int:
    """`static_bytes` of the coordinate on pp that holds most."""
    by_name = {s.name: s for s in specs}
    held = ([s.name for s in specs if r in s.ranks] for r in range(mesh.size("pp")))
    return max(static_bytes(by_name, names, mesh, options) for names in held)


def static_bytes(specs: Mapping[str, ParameterSpec], names: Sequence[str], mesh: Mesh, options: Options) -> int:
    """Parameters, gradients and optimizer states of one rank, on the device."""
    held = [specs[n] for n in names]
    return sum(p.nbytes(mesh) * (2 if p.requires_grad else 1) for p in held) + sum(
        optimizer_bytes(p, mesh) for p in held if p.requires_grad and not options.optimizer_cpu_offload
    )

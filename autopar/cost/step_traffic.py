"""What a whole step moves: its graphs, as often as they run, and what goes between stages."""

from __future__ import annotations

from torch.fx import GraphModule

from autopar.cost.hardware import links_of
from autopar.cost.traffic import Volume, collective_bytes, communication, total_volume
from autopar.ops import collectives as collectives  # registers the raw collectives
from autopar.plan import Plan
from autopar.steps.graphs import Compiled, Pipeline
from autopar.steps.of_rank import broadcasts, graphs_of_rank, sends, shared_gradients, slice_shares

ONCE = ("prologue", "once", "each", "ahead", "gather", "reduce")  # graphs that do not run for every token slice


def graph_runs(compiled: Compiled, rank: int = 0) -> dict[str, tuple[GraphModule, int]]:
    """Name -> (step graph, how often a step runs it), of the ranks at coordinate ``rank`` of pp: forward, or with
    stages part1.backward_input, which runs for every microbatch and token slice."""
    return graphs_of_rank(compiled.pipeline, compiled.prologue, rank)


def step_communication(compiled: Compiled, rank: int | None = None) -> dict[tuple[str, str], Volume]:
    """(axis, kind) -> volume of one whole step: forward and backward of all microbatches, and the prologue; of the
    ranks at coordinate ``rank`` of pp, by default of those that send most.

    With pipeline stages ("pp", "send")
    are values that go to other stages and gradients that come back, ("pp", "all_reduce") the losses and the gradients
    of parameters that several stages hold, ("pp", "broadcast") new buffers.
    """
    mesh, pipeline = compiled.plan.mesh, compiled.pipeline
    if rank is None:
        every = [step_communication(compiled, i) for i in range(mesh.size("pp"))]
        return max(every, key=lambda volumes: sum(v.bytes for v in volumes.values()))
    shares = slice_shares(pipeline)
    share = sum(shares) / len(shares)  # of graphs that run for every token slice
    volumes = []
    for name, (gm, n) in graph_runs(compiled, rank).items():
        once = name.rpartition(".")[2].rstrip("0123456789") in ONCE
        volumes.append({k: v.times(n, 1.0 if once else share) for k, v in communication(gm, mesh).items()})
    if mesh.size("pp") > 1:
        volumes.append(_between_stages(compiled, pipeline, rank))
    return total_volume(volumes)


def transfer_seconds(plan: Plan, axis: str, kind: str, volume: Volume) -> float:
    """What a step's transfers over an axis take one after another, over the links that the options name, or else the
    device's; how many of them hide behind computing is not counted."""
    wires = links_of(plan.options).of(axis)
    return wires.seconds(kind, volume.bytes, plan.mesh.size(axis), volume.calls) if volume.bytes else 0.0


def _between_stages(compiled: Compiled, pipeline: Pipeline, rank: int) -> dict[tuple[str, str], Volume]:
    """What goes over pp."""
    mesh, bucket = compiled.plan.mesh, compiled.plan.options.bucket_bytes
    nodes = {s.name: s.node for s in compiled.signature.inputs if s.kind == "parameter"}
    sums = shared_gradients(pipeline, compiled.parameters, nodes, mesh, rank, bucket) if compiled.train else []
    if compiled.losses:
        sums.append((8 * len(compiled.losses), mesh.size("pp"), 1))
    moved = {
        "send": list(sends(pipeline, rank)),
        "all_reduce": [collective_bytes("all_reduce", size, n) for size, n, _ in sums],
        "broadcast": broadcasts(pipeline, rank, compiled.train),
    }
    return {("pp", kind): Volume(len(sizes), sum(sizes)) for kind, sizes in moved.items() if sizes}

"""How long a step takes on any mesh, what of it is computing, and which share of the chips' speed that is.

The step is its Order, simulated (`autopar.schedule.simulate`) on times of graphs whose transfers run beside computing
(`autopar.cost.graph_times`), over the links that the options name or the device's. The optimizer's step is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from autopar.cost.axis_shares import forward_flops
from autopar.cost.flops import flops
from autopar.cost.graph_times import GraphTimes, graph_times
from autopar.cost.hardware import device_of, links_of
from autopar.cost.stage_costs import stage_costs, timeline_of
from autopar.cost.traffic import Links
from autopar.steps.graphs import Compiled, StepGraph
from autopar.steps.of_rank import graphs_of_rank

TimesOfGraphs = Callable[[GraphModule], GraphTimes]
TRAINED = 3  # FLOPs of forward and backward, of those of the forward: two products for one (Kaplan et al. 2020, 2.1)


@dataclass(frozen=True)
class StepEstimate:
    """seconds: of a step. computing, exposed: of the rank that computes longest, without and in wait for transfers
    within its graphs; ``moving``: of all these transfers, one after another. flops: of the model, on the whole batch,
    what is made again not counted. utilization: flops / (seconds · ranks · peak of the chip), MFU (Chowdhery et al.
    2022, appendix B)."""

    device: str
    links: str
    seconds: float
    computing: float
    moving: float
    exposed: float
    flops: float
    utilization: float


def step_estimate(compiled: Compiled, times: TimesOfGraphs | None = None) -> StepEstimate:
    """Of a compiled step."""
    plan = compiled.plan
    device, times = device_of(plan.options), times or times_of_graphs(compiled)
    seconds = _seconds(compiled, times)
    sums = [_sums(compiled, times, rank) for rank in range(plan.mesh.size("pp"))]
    computing, moving, exposed = max(sums)
    work = (TRAINED if compiled.train else 1) * forward_flops(compiled.local, plan)
    peak = device.speed(_dtype(compiled)) / device.efficiency * plan.mesh.world_size
    return StepEstimate(
        device.name, str(links_of(plan.options)) or str(device.links), seconds, computing, moving, exposed, work,
        work / (seconds * peak) if seconds else 0.0,
    )  # fmt: skip


def times_of_graphs(compiled: Compiled) -> TimesOfGraphs:
    """What the options' device and links make of a compiled step's graphs; of equal ones once."""
    plan = compiled.plan
    device, links = device_of(plan.options), Links(plan.mesh, links_of(plan.options))
    return functools.cache(lambda gm: graph_times(gm, device, links))


def _seconds(compiled: Compiled, times: TimesOfGraphs) -> float:
    pipeline = compiled.pipeline

    def of(graphs: Iterable[StepGraph | None]) -> tuple[float, ...]:
        return tuple(times(g.unnamed).seconds if g is not None else 0.0 for g in graphs)

    costs = replace(
        stage_costs(pipeline.parts, pipeline.hops, compiled.plan),
        F=of(p.forward for p in pipeline.parts),
        B=of(p.backward_input or p.backward_reduce or p.backward for p in pipeline.parts),
        W=of(p.backward_weight for p in pipeline.parts),
        G=of(p.gather for p in pipeline.parts),
        R=of(p.reduce for p in pipeline.parts),
    )
    return timeline_of(compiled, costs).cost


def _sums(compiled: Compiled, times: TimesOfGraphs, rank: int) -> tuple[float, float, float]:
    """(computing, moving, exposed) of all runs of a rank's graphs."""
    totals = [0.0, 0.0, 0.0]
    for gm, runs in graphs_of_rank(compiled.pipeline, compiled.prologue, rank).values():
        found = times(gm)
        for i, values in enumerate((found.computing, found.moving, found.exposed)):
            totals[i] += runs * sum(values.values())
    return totals[0], totals[1], totals[2]


def _dtype(compiled: Compiled) -> torch.dtype:
    """In which most is computed."""
    by_dtype: dict[torch.dtype, int] = {}
    for node in compiled.local.graph.nodes:
        if (dtype := _result_dtype(node)) is not None:
            by_dtype[dtype] = by_dtype.get(dtype, 0) + flops(node)
    return max(by_dtype, key=by_dtype.__getitem__, default=torch.float32)


def _result_dtype(node: Node) -> torch.dtype | None:
    val = node.meta.get("val")
    first = val[0] if isinstance(val, (tuple, list)) and val else val
    return first.dtype if isinstance(first, torch.Tensor) else None

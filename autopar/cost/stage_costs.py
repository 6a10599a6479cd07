"""Seconds and bytes of the actions of pipeline stages, estimated from their step graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from torch.fx import GraphModule

from autopar.cost.graph_times import GraphTimes, Segments, graph_times, seconds_by_turns, segments_of
from autopar.cost.hardware import Links, device_of
from autopar.ir.expert_layers import axis_of_experts
from autopar.ir.graph import nbytes, placeholders
from autopar.ir.storages import storage_bytes
from autopar.plan import Plan
from autopar.schedule.order import P2PEdge
from autopar.schedule.request import Costs
from autopar.schedule.simulate import Timeline, simulate
from autopar.steps.graphs import Compiled, Pipeline, Stage, StepGraph, is_a
from autopar.steps.of_rank import edge_bytes, lowered_order, slice_shares

TimesOfGraphs = Callable[[GraphModule], GraphTimes]


def times_of_graphs(plan: Plan) -> TimesOfGraphs:
    """Times of step graphs on the plan's hardware, whose transfers overlap with computation, cached."""
    device, links = device_of(plan.options), Links.of(plan.options, plan.mesh)
    return cache(lambda gm: graph_times(gm, device, links))


def stage_costs(
    parts: Sequence[Stage], edges: Sequence[P2PEdge], plan: Plan, times: TimesOfGraphs | None = None
) -> Costs:
    """Seconds and bytes of every part's actions, estimated from its step graphs. Exchanges of tokens overlap in cells
    with the other half."""
    device, links, times = device_of(plan.options), Links.of(plan.options, plan.mesh), times or times_of_graphs(plan)
    axis = axis_of_experts(plan.experts)

    @cache  # equal parts take equal times
    def segments(gm: GraphModule) -> Segments:
        return segments_of(gm, axis, device, links)

    @cache
    def together(forward: GraphModule, backward: GraphModule) -> float:
        apart = times(forward).seconds + times(backward).seconds
        return min(apart, seconds_by_turns(segments(forward), segments(backward)))

    def cells() -> tuple[tuple[float, ...], ...] | None:
        backs = [p.backward for p in parts]
        if not axis or not all(backs):
            return None
        return tuple(tuple(together(p.forward.unnamed, b.unnamed) for b in backs if b) for p in parts)

    def time(graph: StepGraph | None) -> float:
        return times(graph.unnamed).seconds if graph is not None else 0.0

    received = [sum(_edge_bytes(h) for h in edges if h.target == k) for k in range(len(parts))]
    comm = max((links.seconds("pp", "send", _edge_bytes(h)) for h in edges), default=0.0)
    return Costs(
        F=tuple(time(p.forward) for p in parts),
        B=tuple(time(p.backward_input or p.backward_reduce or p.backward) for p in parts),
        W=tuple(time(p.backward_weight) for p in parts),
        comm=comm,
        FB=cells(),
        G=tuple(time(p.gather) for p in parts),
        R=tuple(time(p.reduce) for p in parts),
        activations=tuple(float(kept(p) + r) for p, r in zip(parts, received, strict=True)),
        stash=tuple(float(_taken(p.backward_weight)) for p in parts),
    )


def kept(part: Stage) -> int:
    """Bytes that F of a part keeps for its backward, without received values."""
    names = part.forward.outputs
    return storage_bytes(part.forward.unnamed, [i for i, n in enumerate(names) if is_a(n, "saved")])


def _taken(step: StepGraph | None) -> int:
    """Bytes that W takes over from F and B."""
    if step is None:
        return 0
    nodes = dict(zip(step.inputs, placeholders(step.unnamed), strict=True))
    return sum(nbytes(n) for name, n in nodes.items() if is_a(name, "saved", "stash"))


def _edge_bytes(edge: P2PEdge) -> int:
    return sum(math.prod(shape) for shape in edge.shapes) * edge.dtype.itemsize


# --- a step, simulated on these costs ------------------------------------------------------------------


def step_timeline(compiled: Compiled, unit: float = 1.0, times: TimesOfGraphs | None = None) -> Timeline:
    """The step of a compiled model, as its ranks run it, with times estimated from its graphs, in units of ``unit``
    seconds; memory in bytes."""
    pipeline, plan = compiled.pipeline, compiled.plan
    costs = stage_costs(pipeline.parts, pipeline.edges, plan, times)
    if pipeline.order.slices > 1 and not costs.tokens:
        costs = _of_slices(costs, pipeline, Links.of(plan.options, plan.mesh).axis("pp").seconds("send", 0.0))
    return simulate(lowered_order(pipeline), in_units(costs, unit))


def _of_slices(costs: Costs, pipeline: Pipeline, latency: float) -> Costs:
    """Costs of a whole microbatch, from those of the token slice for which the graphs are compiled: all grow with the
    tokens."""
    shares = slice_shares(pipeline)
    whole = sum(shares)
    changed: dict[str, Any] = {}
    for name in ("F", "B", "W", "stash"):
        value = getattr(costs, name)
        changed[name] = tuple(v * whole for v in value) if isinstance(value, tuple) else value * whole

    def received(part: int) -> int:
        return sum(edge_bytes(h, i) for h in pipeline.edges if h.target == part for i in range(len(shares)))

    changed["activations"] = tuple(kept(part) * whole + received(k) for k, part in enumerate(pipeline.parts))
    changed["comm"] = latency + (costs.comm - latency) / len(shares)  # a transfer is of one slice
    part = tuple(share / whole for share in shares)
    return replace(costs, **changed, scale=part, tokens=part)


def in_units(costs: Costs, unit: float) -> Costs:
    """Costs with their times in units of ``unit`` seconds."""
    times = {name: getattr(costs, name) for name in ("F", "B", "W", "comm", "FB", "G", "R")}
    return replace(costs, **{name: _divided(value, unit) for name, value in times.items() if value is not None})


def _divided(value: Any, unit: float) -> Any:
    return tuple(_divided(v, unit) for v in value) if isinstance(value, tuple) else value / unit

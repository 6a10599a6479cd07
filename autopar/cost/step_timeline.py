"""A step, simulated on times that are estimated from its graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.cost.hardware import links_of
from autopar.cost.stage_costs import kept, stage_costs
from autopar.cost.topology import Topology
from autopar.schedule.request import Costs
from autopar.schedule.simulate import Timeline, simulate
from autopar.steps.graphs import Compiled, Pipeline
from autopar.steps.of_rank import hop_bytes, lowered_order, slice_shares


def step_timeline(compiled: Compiled, unit: float = 1.0) -> Timeline:
    """The step of a compiled model, as its ranks run it, on times estimated from its graphs, in units of ``unit``
    seconds; memory in bytes."""
    pipeline = compiled.pipeline
    return timeline_of(compiled, stage_costs(pipeline.parts, pipeline.hops, compiled.plan), unit)


def timeline_of(compiled: Compiled, costs: Costs, unit: float = 1.0) -> Timeline:
    """The same on other times."""
    pipeline = compiled.pipeline
    if pipeline.order.slices > 1 and not costs.tokens:
        costs = _of_slices(costs, pipeline, links_of(compiled.plan.options).of("pp"))
    return simulate(lowered_order(pipeline), in_units(costs, unit))


def _of_slices(costs: Costs, pipeline: Pipeline, links: Topology) -> Costs:
    """From the costs of the token slice that the graphs' shapes are for to those of a microbatch of several: all grow
    with the tokens."""
    shares = slice_shares(pipeline)
    whole = sum(shares)
    changed: dict[str, Any] = {}
    for name in ("F", "B", "W", "stash"):
        value = getattr(costs, name)
        changed[name] = tuple(v * whole for v in value) if isinstance(value, tuple) else value * whole

    def received(part: int) -> int:
        return sum(hop_bytes(h, i) for h in pipeline.hops if h.target == part for i in range(len(shares)))

    changed["activations"] = tuple(kept(part) * whole + received(k) for k, part in enumerate(pipeline.parts))
    changed["comm"] = links.latency + (costs.comm - links.latency) / len(shares)  # a transfer is of one slice
    part = tuple(share / whole for share in shares)
    return replace(costs, **changed, scale=part, tokens=part)


def in_units(costs: Costs, unit: float) -> Costs:
    """Costs with their times in units of ``unit`` seconds."""
    changed: dict[str, Any] = {}
    for name in ("F", "B", "W", "comm", "FB", "G", "R"):
        value = getattr(costs, name)
        if value is not None:
            changed[name] = _divided(value, unit)
    return replace(costs, **changed)


def _divided(value: Any, unit: float) -> Any:
    return tuple(_divided(v, unit) for v in value) if isinstance(value, tuple) else value / unit

"""The order of a step's actions, and which ranks hold which parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import GraphModule

from autopar.cost.stage_costs import stage_costs
from autopar.ir.graph import global_shape, placeholders
from autopar.ir.mesh import Mesh
from autopar.ir.meta import signature_of
from autopar.ir.signature import ParameterSpec
from autopar.plan import PipelinePlan, Plan
from autopar.schedule.order import Action, Order, P2PEdge
from autopar.schedule.request import SCHEDULES, Request
from autopar.steps.graphs import Stage


def make_order(
    plan: Plan, parts: Sequence[Stage], edges: Sequence[P2PEdge], train: bool = True, static: int = 0
) -> Order:
    """The compute actions of a step. ``static``: bytes of parameters, gradients and optimizer states on the fullest
    rank; the rest of the memory limit is for activations.

    Raises ValueError if the schedule does not support the number of microbatches.
    """
    pipeline = plan.pipeline
    if pipeline is None:
        return sequential_order(plan.options.microbatches, train)
    entry = SCHEDULES[pipeline.schedule]
    costs = stage_costs(parts, edges, plan)
    limit = float(plan.options.memory_limit - static) if plan.options.memory_limit else None
    slices = max(len(pipeline.token_slices), 1)
    request = Request(plan.mesh.size("pp"), plan.options.microbatches, pipeline.virtual_stages, slices, costs, limit)
    if train:
        return entry.make(request)
    return forward_order(entry.make(replace(request, microbatches=least_microbatches(pipeline, plan.mesh))))


def planned_order(plan: Plan) -> Order:
    """The order of a step whose stages all take equally long."""
    pipeline, microbatches = plan.pipeline, plan.options.microbatches
    if pipeline is None:
        return sequential_order(microbatches, True)
    slices = max(len(pipeline.token_slices), 1)
    return SCHEDULES[pipeline.schedule].make(
        Request(plan.mesh.size("pp"), microbatches, pipeline.virtual_stages, slices)
    )


def most_waiting(order: Order) -> int:
    """The most microbatches at once for which the last part has run F, but neither BW nor W yet."""
    most, last = 0, order.parts - 1
    for row in order.ranks:
        waiting = 0
        for action in row:
            if order.part_of(action.stage) == last:
                waiting += (action.kind == "F") - (action.kind in ("BW", "BWR", "W"))
                most = max(most, waiting)
    return most


def sequential_order(microbatches: int, train: bool) -> Order:
    """The order of a model without pipeline stages: F and BW of each microbatch."""
    kinds = ("F", "BW") if train else ("F",)
    row = tuple(Action(0, kind, i) for i in range(microbatches) for kind in kinds)
    return Order("one part", (row,), ((0,),), (0,), (0,) * microbatches)


def forward_order(order: Order) -> Order:
    """F of one microbatch along the first chain: for evaluation."""
    rows: list[list[Action]] = [[] for _ in order.ranks]
    for stage in order.chains[0]:
        rows[order.rank_of[stage]].append(Action(stage, "F", 0))
    return Order("forward", tuple(map(tuple, rows)), order.chains, order.rank_of, (0,))


def layout(pipeline: PipelinePlan, mesh: Mesh) -> Order:
    """Chains and ranks of a schedule's stages, for a number of microbatches that it supports."""
    ranks = mesh.size("pp")
    slices = max(len(pipeline.token_slices), 1)
    request = Request(ranks, least_microbatches(pipeline, mesh), pipeline.virtual_stages, slices)
    return SCHEDULES[pipeline.schedule].make(request)


def least_microbatches(pipeline: PipelinePlan, mesh: Mesh) -> int:
    """A number of microbatches that every schedule supports."""
    return 2 * mesh.size("pp") * pipeline.virtual_stages


def owners(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Parameter -> the coordinates on pp that hold it, its owner first. The first one holds what nothing uses."""
    return owners_of(plan.pipeline, plan.mesh) if plan.pipeline is not None else {}


def owners_of(pipeline: PipelinePlan, mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """As `owners`, for a plan's pipeline."""
    order = layout(pipeline, mesh)
    found = {}
    for name, parts in pipeline.holders.items():
        ranks = {order.rank_of[chain[k]] for chain in order.chains for k in parts}
        found[name] = tuple(sorted(ranks)) or (0,)
    return found


def parameter_specs(gm: GraphModule, plan: Plan) -> tuple[ParameterSpec, ...]:
    """The parameters that the runtime holds, from the signature and the plan."""
    ranks = owners(plan)
    nodes = {n.name: n for n in placeholders(gm)}
    return tuple(
        ParameterSpec(
            s.name,
            global_shape(nodes[s.node]),
            nodes[s.node].meta["val"].dtype,
            s.requires_grad,
            s.aliases,
            plan.stored(s.name),
            ranks.get(s.name, (0,)),
        )
        for s in signature_of(gm).inputs
        if s.kind == "parameter"
    )

"""Whether a plan fits a graph: names, dims, and pieces."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch.fx import GraphModule

from autopar.ir.graph import global_shape, placeholders
from autopar.ir.meta import signature_of
from autopar.ir.placement import Placement, Shard, check_shard, local_shape
from autopar.plan import ParameterPlan, Plan
from autopar.planner.batch_dims import check_dims_exist
from autopar.planner.experts.expert_plan import check_experts
from autopar.planner.pipeline.slice_lengths import check_lengths, slice_unit, token_count
from autopar.schedule.request import SCHEDULES

WHOLE_WEIGHTS = ("dp_replicate", "dp", "cp")  # cut the batch or its tokens; over these weights are whole for use
MAKERS = ("", "forward", "backward")  # of the gradients of losses in chunks; "": not decided


def check_fits(plan: Plan, gm: GraphModule, train: bool = False) -> None:
    """Names are those of a graph's parameters, dims exist, blocks sum up and divide; a step with gradients (``train``)
    has the token slices that its schedule runs. Raises ValueError.

    Inputs are checked where the graph has them: a plan serves batches with others, too.
    """
    nodes = {n.name: n for n in placeholders(gm)}
    specs = [s for s in signature_of(gm).inputs if s.node in nodes]
    parameters = {s.name: global_shape(nodes[s.node]) for s in specs if s.kind == "parameter"}
    inputs = {s.name: global_shape(nodes[s.node]) for s in specs if s.kind == "input"}
    holders = plan.pipeline.holders if plan.pipeline is not None else {}
    for name in (*plan.parameters, *holders):
        if name not in parameters:
            known = ", ".join(list(parameters)[:6])
            raise ValueError(f"plan: no parameter {name!r} in this model; it has {known}, ...")
    for name in plan.overrides:
        if name not in parameters and name not in plan.inputs and name not in inputs:
            raise ValueError(
                f"plan: an override of {name!r}, which is no parameter or input of this model; leave it out"
            )
    check_dims_exist(plan.batch_dims, inputs)
    check_experts(gm, plan.mesh, plan.experts)
    if plan.loss_gradients not in MAKERS:
        raise ValueError(
            f"plan: gradients of losses in chunks are made in the {plan.loss_gradients!r}; use 'forward' or 'backward'"
        )
    for name, axes in plan.parameters.items():
        _check_cuts(plan, f"parameter {name}", parameters[name], {a: p.stored for a, p in axes.items()})
        _check_cuts(plan, f"parameter {name}, as it is used,", parameters[name], {a: p.used for a, p in axes.items()})
        _check_ways(name, axes, {e.axis for e in plan.experts.values()})
    for name, placed in plan.inputs.items():
        if name in inputs:
            _check_cuts(plan, f"input {name}", inputs[name], placed)
    if train and plan.pipeline is not None and SCHEDULES[plan.pipeline.schedule].sliced:
        check_lengths(plan.pipeline.token_slices, token_count(gm), slice_unit(plan.options, plan.mesh))


def _check_ways(name: str, axes: Mapping[str, ParameterPlan], of_experts: Collection[str]) -> None:
    """A piece of a weight is used as it is, or the weight is gathered: always, where the batch is cut. ``of_experts``:
    the axes that cut experts."""
    for axis, way in axes.items():
        whole = axis in WHOLE_WEIGHTS and axis not in of_experts
        if isinstance(way.used, Shard) and (whole or way.stored != way.used):
            raise ValueError(
                f"plan: parameter {name} is stored as {way.stored} and used as {way.used} on axis {axis!r}; use it as "
                "it is stored, which only tp and ep can, or whole (R)"
            )


def _check_cuts(plan: Plan, name: str, shape: tuple[int, ...], placements: Mapping[str, Placement]) -> None:
    """Each axis cuts what the axes before it left."""
    mesh, left = plan.mesh.with_microbatches(plan.options.microbatches), shape
    for axis, pieces in mesh.cut_order.items():
        p = placements.get(axis)
        if not isinstance(p, Shard):
            continue
        if not 0 <= p.dim < len(shape):
            raise ValueError(
                f"plan: {name} is cut as {p} on axis {axis!r}, it has shape {tuple(shape)}; use an existing dim"
            )
        try:
            check_shard(left[p.dim], p, pieces)
        except ValueError as error:
            why = str(error).removeprefix("placement: ")
            raise ValueError(
                f"plan: {name} of shape {tuple(shape)} on axis {axis!r}: {why}; cut it otherwise, or leave it whole (I)"
            ) from None
        left = local_shape(left, p, pieces)

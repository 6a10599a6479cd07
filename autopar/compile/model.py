"""From a model to step graphs: capture, plan, passes, differentiate. Pure: no process group, any mesh, no
accelerator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from autopar.ac_policies import AUTO
from autopar.capture.front_end import as_captured
from autopar.capture.trace.compiling import compiling
from autopar.compile.ac_solver import LimitError
from autopar.compile.parameters import known_batch_dims
from autopar.compile.partitioned_model import PartitionedModel, graph_to_plan
from autopar.compile.shared_capture import SharedCapture
from autopar.ir.graph import copy_graph
from autopar.ir.mesh import Mesh
from autopar.ir.signature import ParameterSpec
from autopar.options import Options
from autopar.plan import Plan
from autopar.planner import make_plan
from autopar.planner.pipeline.step_order import parameter_specs
from autopar.rewrite.compilation import Compilation, Observer, timed
from autopar.steps.graphs import Compiled


def compile_model(
    model: nn.Module,
    batch: Mapping[str, Any],
    mesh: Mesh,
    options: Options | None = None,
    *,
    train: bool = True,
    grad_mode: str = "grad",
    own_modes: bool = False,
    lift_to_float64: bool = False,
    autocast: torch.dtype | None = None,
    plan: Plan | None = None,
    fixed: Plan | None = None,
    outputs: Sequence[str] | None = None,
    tangents: Sequence[str] = (),
    observers: Sequence[Observer] = (),
    shared: SharedCapture | None = None,
) -> Compiled:
    """Compile a model for one batch shape.

    Args:
        model: any module that torch.export accepts; on cpu, cuda or meta; it is not modified.
        batch: the global batch (all dp ranks, all microbatches); only shapes and dtypes matter.
        train: with gradients, each module in its own mode; otherwise all in eval mode, without gradients.
        grad_mode: the answer that the forward gets when it asks whether gradients are enabled.
        own_modes: without gradients, but each module in its own mode.
        autocast: dtype of a `torch.autocast` around the forward.
        plan: use this plan instead of making one. ``fixed``: make one, but keep the parameter placements of this one.
        outputs: names of the outputs to keep (None: all). Losses are always kept.
        tangents: names of further outputs that the backward starts from, besides the losses.
        observers: called with (name, graph, context) after each level.
        shared: the capture made while planning, reused if it has the same batch and surroundings.
    Raises: ValueError for a model that does not export, sizes that do not divide, ops without a rule.
    """
    asked, timings = options or (plan.options if plan is not None else Options()), dict[str, float]()
    gm = timed(
        timings, "capture",
        lambda: capture_step(
            model, batch, asked, fixed, train=train, grad_mode=grad_mode, own_modes=own_modes,
            lift_to_float64=lift_to_float64, autocast=autocast, shared=shared,
        ),
    )  # fmt: skip
    how: dict[str, Any] = {"plan": plan, "fixed": fixed, "outputs": outputs, "tangents": tangents}
    return compile_graph(gm, mesh, options, train=train, timings=timings, observers=observers, **how)


def capture_step(
    model: nn.Module,
    batch: Mapping[str, Any],
    options: Options,
    fixed: Plan | None = None,
    *,
    train: bool = True,
    grad_mode: str = "grad",
    own_modes: bool = False,
    lift_to_float64: bool = False,
    autocast: torch.dtype | None = None,
    shared: SharedCapture | None = None,
) -> GraphModule:
    """The graph that `compile_model` compiles, which documents the arguments."""
    known_batch_dims(model, batch, options, fixed)  # for its refusals
    batch, shared = as_captured(model, batch, options.static_inputs), shared or SharedCapture()
    how: dict[str, Any] = {"autocast": autocast, "precision": options.precision, "grad_mode": grad_mode}
    modes = None if train or own_modes else False
    return shared.again(model, batch, train=modes, lift_to_float64=lift_to_float64, **how)


def capture_example(
    model: nn.Module,
    batch: Mapping[str, Any],
    options: Options,
    fixed: Plan | None = None,
    *,
    lift_to_float64: bool = False,
    shared: SharedCapture | None = None,
) -> GraphModule:
    """The graph that `plan_graph` plans. ``shared`` keeps a copy for the first step."""
    known_batch_dims(model, batch, options, fixed)  # for its refusals
    batch, shared = as_captured(model, batch, options.static_inputs), shared or SharedCapture()
    return shared.first(model, batch, lift_to_float64=lift_to_float64, precision=options.precision)


def plan_model(
    model: nn.Module, batch: Mapping[str, Any], mesh: Mesh, options: Options, fixed: Plan | None = None, **how: Any
) -> tuple[Plan, tuple[ParameterSpec, ...]]:
    """`plan_graph` of `capture_example`, which documents the other arguments."""
    return plan_graph(capture_example(model, batch, options, fixed, **how), mesh, options, fixed)


def plan_graph(
    gm: GraphModule, mesh: Mesh, options: Options, fixed: Plan | None = None
) -> tuple[Plan, tuple[ParameterSpec, ...]]:
    """The plan, and the parameters that it implies: enough to store and load them. ``gm`` is changed. Compiles only
    where a memory limit leaves two ways to split stages (`autopar.compile.split_points`).

    Use only the decisions about parameters; those that depend on the batch are made when it arrives.
    """
    kept = copy_graph(gm) if fixed is None and follow_limit(mesh, options) else None
    gm = graph_to_plan(gm, Compilation(mesh), options)
    plan = make_plan(gm, mesh, options, fixed, example=True)
    if kept is not None and (settled := _settled_cuts(kept, mesh, options, plan)) is not None:
        plan = make_plan(gm, mesh, options, settled, example=True)
    return plan, parameter_specs(gm, plan)


@compiling
def compile_graph(gm: GraphModule, mesh: Mesh, options: Options | None = None, **how: Any) -> Compiled:
    """`compile_model` for a captured graph, which it changes."""
    compiled: Callable[..., Compiled] = functools.partial(_compiled, mesh=mesh, options=options, **how)
    if options is None or how.get("plan") or how.get("fixed") or not follow_limit(mesh, options):
        return compiled(gm)
    return cut_within_limit(gm, mesh, options, how.get("train", True), compiled)


def _compiled(
    gm: GraphModule,
    mesh: Mesh,
    options: Options | None = None,
    *,
    plan: Plan | None = None,
    observers: Sequence[Observer] = (),
    timings: dict[str, float] | None = None,
    **how: Any,
) -> Compiled:
    options = options or (plan.options if plan is not None else Options())
    timings = {} if timings is None else timings
    ctx = Compilation(mesh.with_microbatches(options.all_microbatches), observers=list(observers), timings=timings)
    return PartitionedModel(gm, mesh, options, ctx, plan=plan, **how).compiled()


def _settled_cuts(gm: GraphModule, mesh: Mesh, options: Options, estimated: Plan) -> Plan | None:
    """A plan with the split points that keep the limit; None if the estimated ones do, or none do."""
    fastest = fastest_cuts(copy_graph(gm), mesh, options, example=True)
    if same_cuts(estimated, fastest):
        return None
    try:
        return compile_graph(gm, mesh, options).plan
    except LimitError:  # the first batch will raise it for its own shape
        return None


# --- split points under a memory limit -----------------------------------------------------------------


def follow_limit(mesh: Mesh, options: Options) -> bool:
    """Whether a memory limit decides the split points, unless a plan does."""
    return mesh.size("pp") > 1 and bool(options.memory_limit) and not options.split_points and options.ac_policy == AUTO


def fastest_cuts(gm: GraphModule, mesh: Mesh, options: Options, **how: Any) -> Plan:
    """The plan without a limit."""
    free = replace(options, memory_limit=0, activation_offload=0, activation_checkpoint="none")
    return make_plan(graph_to_plan(gm, Compilation(mesh), free), mesh, free, **how)


def same_cuts(one: Plan, other: Plan) -> bool:
    """Whether two plans have the same stages under the same schedule."""
    assert one.pipeline is not None and other.pipeline is not None
    return (one.pipeline.schedule, one.pipeline.split_points) == (other.pipeline.schedule, other.pipeline.split_points)


def cut_within_limit(
    gm: GraphModule, mesh: Mesh, options: Options, train: bool, compiled: Callable[..., Compiled]
) -> Compiled:
    """The result of ``compiled(graph)``, or ``compiled(graph, fixed=plan)``. Raises the LimitError of the fastest
    split points."""
    kept = copy_graph(gm)
    try:
        return compiled(gm)
    except LimitError as error:
        plan = fastest_cuts(copy_graph(kept), mesh, options, train=train)
        if same_cuts(plan, error.plan):
            raise
    return compiled(kept, fixed=plan)

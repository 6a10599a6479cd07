"""From a model to step graphs: capture, plan, passes, differentiate. Pure: no process group, any mesh, no
accelerator."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from autopar.ac_policies import AUTO
from autopar.adapters.fx.lazy import lazy_code
from autopar.capture.trace.frame_stack import with_large_stack
from autopar.capture.trace.gc_pause import paused_collector
from autopar.compile.ac_solver import LimitError, with_checkpoints
from autopar.compile.loss_chunks import Made, in_chunks
from autopar.compile.parameters import known_batch_dims, normalized
from autopar.compile.shared_capture import SharedCapture
from autopar.compile.slices import samples_of
from autopar.compile.stages import StageBuilder
from autopar.compile.tiles import in_tiles
from autopar.cost.axis_shares import axis_shares
from autopar.cost.memory import most_static
from autopar.ir.batch import with_static_inputs
from autopar.ir.graph import copy_graph, loss_places, output_node, remove_dead_code
from autopar.ir.mesh import Mesh
from autopar.ir.signature import ParameterSpec
from autopar.options import Options
from autopar.passes.autodiff.differentiate import lowered
from autopar.passes.pipelines import PLACEMENT_PASSES
from autopar.passes.stage.slice_tokens import slice_tokens
from autopar.passes.stage.split_prologue import split_prologue
from autopar.plan import Plan, check_plan
from autopar.planner import make_plan
from autopar.planner.experts.expert_axis import kept_axis
from autopar.planner.pipeline.step_order import parameter_specs
from autopar.planner.plan_fits import check_fits
from autopar.rewrite.compilation import Compilation, Observer, timed
from autopar.rewrite.pass_manager import PassManager
from autopar.steps.graphs import Cache, Compiled, Pipeline, Prologue


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
    batch, shared = with_static_inputs(batch, options.static_inputs), shared or SharedCapture()
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
    batch, shared = with_static_inputs(batch, options.static_inputs), shared or SharedCapture()
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
    gm = normalized(gm, Compilation(mesh))
    plan = make_plan(gm, mesh, options, fixed, example=True)
    if kept is not None and (settled := _settled_cuts(kept, mesh, options, plan)) is not None:
        plan = make_plan(gm, mesh, options, settled, example=True)
    return plan, parameter_specs(gm, plan)


@with_large_stack
@paused_collector()
@lazy_code()
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
    train: bool = True,
    plan: Plan | None = None,
    fixed: Plan | None = None,
    outputs: Sequence[str] | None = None,
    tangents: Sequence[str] = (),
    observers: Sequence[Observer] = (),
    timings: dict[str, float] | None = None,
) -> Compiled:
    options = options or (plan.options if plan is not None else Options())
    timings = {} if timings is None else timings
    ctx = Compilation(mesh.with_microbatches(options.all_microbatches), observers=list(observers), timings=timings)
    ctx.observe("capture", gm)
    gm = normalized(gm, ctx)
    if outputs is not None:
        keep_outputs(gm, outputs)
    if plan is None:
        plan = timed(timings, "plan", lambda: make_plan(gm, mesh, options, fixed, train=train))
    else:
        check_plan(plan)
        check_fits(plan, gm, train)
        kept_axis(options, plan)  # for its refusals
    ctx.plan = plan
    slices = samples_of(plan, train)
    contexts = [ctx.of_slice(s, s is slices[0]) for s in slices] or [ctx]
    local = [
        PassManager(PLACEMENT_PASSES).run(copy_graph(gm) if slices else gm, c, facts=("functional",)) for c in contexts
    ]
    ctx.plan = plan = dataclasses.replace(plan, shares=axis_shares(local[0], plan))
    made = [_of_microbatch(*pair) for pair in zip(local, contexts, strict=True)]
    gm, prologue = made[0][0], made[0][2]
    pre_pass = made[0][3]
    if prologue is not None:
        prologue.graph = lowered(prologue.graph)
        ctx.observe("prologue", prologue.graph)
    if pre_pass is not None:
        ctx.plan = plan = _with_pre_pass(plan, pre_pass)
    parameters = parameter_specs(gm, plan)
    graphs, static = [(graph, caches) for graph, caches, _, _ in made], most_static(parameters, mesh, options)

    def attempt(graphs: Sequence[Made]) -> Compiled:
        def finished(plan: Plan, pipeline: Pipeline) -> Compiled:
            return Compiled(gm.meta["signature"], plan, graphs[0][0], pipeline, prologue, parameters, train, timings)

        return with_checkpoints(StageBuilder(graphs, ctx, train, static, tangents, slices, pre_pass), finished)

    return in_tiles(graphs, ctx, train, lambda tiled: in_chunks(tiled, ctx, train, attempt))


def _settled_cuts(gm: GraphModule, mesh: Mesh, options: Options, estimated: Plan) -> Plan | None:
    """A plan with the split points that keep the limit; None if the estimated ones do, or none do."""
    fastest = fastest_cuts(copy_graph(gm), mesh, options, example=True)
    if same_cuts(estimated, fastest):
        return None
    try:
        return compile_graph(gm, mesh, options).plan
    except LimitError:  # the first batch will raise it for its own shape
        return None


def _with_pre_pass(plan: Plan, pre_pass: GraphModule) -> Plan:
    """The plan with a note of the pre-pass, whose cost matters."""
    note = (
        f"{len(pre_pass.meta['results'])} values of all microbatches depend on weights: a forward of each runs before "
        'the step, without gradients; aux_loss_scope="microbatch" avoids this for auxiliary losses'
    )
    return dataclasses.replace(plan, notes=(*plan.notes, ("prologue", note)))


def _of_microbatch(
    gm: GraphModule, ctx: Compilation
) -> tuple[GraphModule, list[Cache], Prologue | None, GraphModule | None]:
    """The graph of a microbatch, or of a slice of its tokens, on one rank, before stages are split and differentiated,
    and the graph of the pre-pass."""
    gm, prologue, pre_pass = split_prologue(gm, ctx)
    gm, caches = slice_tokens(gm, ctx)
    if ctx.mesh.slice is not None:
        ctx.observe("slice_tokens", gm)
    return gm, caches, prologue, pre_pass


def keep_outputs(gm: GraphModule, names: Sequence[str]) -> None:
    """Drop the outputs that are not wanted; losses and new buffer values stay."""
    signature, out, losses = gm.meta["signature"], output_node(gm), loss_places(gm)
    kept = [
        (spec, value)
        for i, (spec, value) in enumerate(zip(signature.outputs, out.args[0], strict=True))  # type: ignore[arg-type]
        if spec.kind == "mutation" or spec.name in names or i in losses
    ]
    out.args = (tuple(value for _, value in kept),)
    gm.meta["signature"] = dataclasses.replace(signature, outputs=tuple(spec for spec, _ in kept))
    remove_dead_code(gm)
    gm.recompile()


# --- split points under a memory limit -----------------------------------------------------------------


def follow_limit(mesh: Mesh, options: Options) -> bool:
    """Whether a memory limit decides the split points, unless a plan does."""
    return mesh.size("pp") > 1 and bool(options.memory_limit) and not options.split_points and options.ac_policy == AUTO


def fastest_cuts(gm: GraphModule, mesh: Mesh, options: Options, **how: Any) -> Plan:
    """The plan without a limit."""
    free = replace(options, memory_limit=0, activation_offload=0, activation_checkpoint="none")
    return make_plan(normalized(gm, Compilation(mesh)), mesh, free, **how)


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

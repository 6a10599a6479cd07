"""From a model to step graphs: capture, plan, passes, differentiate. Pure: no process group, any mesh, no
accelerator."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule

from autopar.adapters.lazy import lazy_code
from autopar.batch import (
    UNCLEAR,
    BatchDims,
    check_batch_dims,
    check_dims_exist,
    likely_dims,
    tensors_of,
    whole_batch,
)
from autopar.capture import adapter_for, capture
from autopar.graph import (
    copy_graph,
    global_shape,
    has_gradient,
    mark_gradients,
    output_node,
    placeholders,
    remove_dead_code,
)
from autopar.mesh import Mesh
from autopar.parameter import ParameterSpec
from autopar.pass_manager import Context, Observer, PassManager
from autopar.passes import GLOBAL_PASSES, PLACEMENT_PASSES, STEP_PASSES
from autopar.passes.accumulate_gradients import split_accumulation
from autopar.passes.differentiate import differentiate, lowered
from autopar.passes.place_token_slices import token_count
from autopar.passes.slice_sizes import sample_slices
from autopar.passes.slice_tokens import slice_tokens
from autopar.passes.split_prologue import split_prologue
from autopar.pipeline import compile_pipeline, compile_sliced_pipeline
from autopar.plan import Options, Plan
from autopar.plan_checks import check_fits, check_plan
from autopar.planner import batch_dims, make_plan
from autopar.planner.batch import decide_batch_dims
from autopar.planner.pipeline import main_parts, most_static, owners, plan_pipeline
from autopar.planner.token_slices import best_lengths, slice_lengths
from autopar.schedule import SCHEDULES
from autopar.step_checks import check_gradients, promise
from autopar.steps import Compiled


def plan_model(
    model: nn.Module, batch: Mapping[str, Any], mesh: Mesh, options: Options, fixed: Plan | None = None
) -> tuple[Plan, tuple[ParameterSpec, ...]]:
    """The plan, and what it makes of the parameters, without compiling: enough to hold and load them.

    Only the parameters' decisions are meant to be used; those that depend on the batch are made when a batch comes.
    """
    lean = dataclasses.replace(options, sequence_parallel=False, micro_batches=1)
    check_batch_dims(model, batch, dict(options.batch_dims))
    gm = _planning_graph(model, batch, Context(mesh))
    plan = _with_pipeline(make_plan(gm, mesh, lean, fixed), gm, options, fixed)
    dims = batch_dims(gm, mesh, options, fixed) | dict(plan.batch_dims)
    unclear = gm.meta.get("unclear_batch_dims", []) if mesh.size("dp") > 1 else []
    notes = tuple((f"input {name}", UNCLEAR) for name in unclear)
    plan = dataclasses.replace(plan, batch_dims=dims, notes=(*plan.notes, *notes))
    return plan, parameter_specs(gm, plan)


T = TypeVar("T")


def for_whole_batch(
    make: Callable[[dict[str, Any]], T],
    plan_of: Callable[[T], Plan],
    model: nn.Module,
    batch: Mapping[str, Any],
    mesh: Mesh,
    options: Options,
    fixed: Plan | None = None,
) -> T:
    """What ``make`` makes of the whole batch, from one dp rank's part of it.

    The whole is made along likely batch dims; if its plan says that they are others, it is made anew. For a model
    whose inputs an adapter knows, or a plan that knows them, that does not happen.
    """
    ranks, known = mesh.size("dp"), known_batch_dims(model, batch, options, fixed)
    shapes = {name: tuple(x.shape) for name, x in tensors_of(batch).items()}
    check_dims_exist(known, shapes)
    dims, tried = likely_dims(shapes, {n: d for n, d in known.items() if n in shapes}), []
    while dims not in tried:
        tried.append(dims)
        try:
            made = make(whole_batch(batch, dims, ranks))
            found = plan_of(made).batch_dims
            if ranks == 1 or all(dims.get(name, dim) == dim for name, dim in found.items()):
                return made
        except ValueError:
            if ranks == 1 or set(shapes) <= set(known) or len(tried) > 1:
                raise
            found = _dims_of_part(model, batch, options, fixed)  # a wrong whole may be no batch of the model at all
            if all(dims.get(name, dim) == dim for name, dim in found.items()):
                raise
        dims = {**dims, **found}
    raise ValueError(
        f"batch_dims: which dim of which input is the batch is not clear: {' or '.join(map(str, tried))}; say it with "
        "batch_dims={...}, None for an input that is no part of the batch"
    )


def known_batch_dims(
    model: nn.Module, batch: Mapping[str, Any], options: Options, fixed: Plan | None
) -> dict[str, int | None]:
    """Batch dims that need no evidence: of an adapter, an earlier plan, the user. The later ones count."""
    check_batch_dims(model, batch, dict(options.batch_dims))
    adapter = adapter_for(model)
    hints = adapter.batch_dims(model, batch) if adapter is not None else {}
    return {**hints, **(fixed.batch_dims if fixed is not None else {}), **dict(options.batch_dims)}


def _dims_of_part(model: nn.Module, batch: Mapping[str, Any], options: Options, fixed: Plan | None) -> BatchDims:
    """Batch dims by the graph of one rank's part of the batch."""
    return decide_batch_dims(
        _planning_graph(model, batch, Context(Mesh.of(dp=1))),
        dict(options.batch_dims),
        fixed.batch_dims if fixed is not None else {},
    )


def _planning_graph(model: nn.Module, batch: Mapping[str, Any], ctx: Context) -> GraphModule:
    gm = PassManager(GLOBAL_PASSES).run(capture(model, batch), ctx)
    mark_gradients(gm, [s.node for s in gm.meta["signature"].inputs if s.kind == "parameter" and s.requires_grad])
    return gm


def _with_pipeline(plan: Plan, gm: GraphModule, options: Options, fixed: Plan | None) -> Plan:
    """The plan with the parts of a mesh with several ranks on pp."""
    if plan.mesh.size("pp") == 1:
        return plan
    known = fixed.pipeline if fixed is not None else None
    if options.schedule and SCHEDULES[options.schedule].sliced and plan.mesh.size("cp") > 1:
        raise ValueError(
            f'pipeline: the schedule {options.schedule} cuts the sequence in time, the axis "cp" cuts it over ranks; '
            "keys of earlier slices would lie on all ranks; use a schedule without token slices, or no axis cp"
        )
    pipeline, notes = plan_pipeline(gm, plan.mesh, options, parameter_specs(gm, plan), known)
    return dataclasses.replace(plan, pipeline=pipeline, notes=(*plan.notes, *notes))


def compile_model(
    model: nn.Module,
    batch: Mapping[str, Any],
    mesh: Mesh,
    options: Options | None = None,
    *,
    train: bool = True,
    exact: bool = False,
    autocast: torch.dtype | None = None,
    plan: Plan | None = None,
    fixed: Plan | None = None,
    outputs: Sequence[str] | None = None,
    tangents: Sequence[str] = (),
    observers: Sequence[Observer] = (),
) -> Compiled:
    """Compile a model for one batch shape.

    Args:
        model: any module that torch.export accepts; on cpu, cuda or meta; it is not modified.
        batch: the whole batch (all dp ranks, all micro-batches); only shapes and dtypes matter.
        train: with gradients, each module in the mode that it has; otherwise all in eval mode, without gradients.
        autocast: dtype of a `torch.autocast` around the forward.
        plan: use this plan instead of making one. ``fixed``: make one, but keep the parameter placements of this one.
        outputs: names of the outputs to keep (None: all). Losses are always kept.
        tangents: names of further outputs that the backward starts from, beside the losses.
        observers: called with (name, graph, context) after each level.
    Raises: ValueError for a model that does not export, sizes that do not divide, ops without a rule.
    """
    start = time.perf_counter()
    check_batch_dims(model, batch, dict(options.batch_dims) if options is not None else {})
    gm = capture(model, batch, train=None if train else False, exact=exact, autocast=autocast)
    seconds = time.perf_counter() - start
    how: dict[str, Any] = {"plan": plan, "fixed": fixed, "outputs": outputs, "tangents": tangents}
    return compile_graph(gm, mesh, options, train=train, timings={"capture": seconds}, observers=observers, **how)


@lazy_code()
def compile_graph(
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
    """`compile_model` for a captured graph, which it changes."""
    options = options or (plan.options if plan is not None else Options())
    timings = {} if timings is None else timings
    ctx = Context(mesh.with_micro_batches(options.micro_batches), observers=list(observers), timings=timings)
    ctx.observe("capture", gm)
    gm = PassManager(GLOBAL_PASSES).run(gm, ctx)
    mark_gradients(gm, [s.node for s in gm.meta["signature"].inputs if s.kind == "parameter" and s.requires_grad])
    if outputs is not None:
        keep_outputs(gm, outputs)
    if plan is None:
        plan = _timed(timings, "plan", lambda: _with_pipeline(make_plan(gm, mesh, options, fixed), gm, options, fixed))
    else:
        check_plan(plan)
        check_fits(plan, gm)
    ctx.plan = plan
    if train and plan.pipeline is not None and SCHEDULES[plan.pipeline.schedule].sliced:
        return _compile_sliced(gm, ctx)
    gm = PassManager(PLACEMENT_PASSES).run(gm, ctx, facts=("functional",))
    gm, prologue = split_prologue(gm, ctx)
    if prologue is not None:
        prologue.graph = lowered(prologue.graph)
        ctx.observe("prologue", prologue.graph)
    parameters = parameter_specs(gm, plan)
    if plan.pipeline is not None:
        pipeline = _timed(timings, "pipeline", lambda: compile_pipeline(gm, ctx, train, most_static(parameters, mesh)))
        return Compiled(gm.meta["signature"], plan, gm, None, prologue, parameters, train, ctx, pipeline)
    steps = _timed(timings, "differentiate", lambda: differentiate(gm, train, tangents))
    if steps.backward is not None:
        check_gradients(steps.backward, steps.gradients, gm)
    if options.micro_batches > 1 and steps.backward is not None:
        steps.backward_local, steps.backward = split_accumulation(steps.backward)
    graphs = {"forward": steps.forward, "backward_local": steps.backward_local, "backward": steps.backward}
    for name, step in graphs.items():
        if step is not None:
            with ctx.within(f"{name}."):
                ctx.observe("differentiate", step)
                PassManager(STEP_PASSES).run(promise(step), ctx, facts=("step",))
            ctx.observe(name, step)
    return Compiled(gm.meta["signature"], plan, gm, steps, prologue, parameters, train, ctx)


def _compile_sliced(gm: GraphModule, ctx: Context) -> Compiled:
    """The pipeline of token slices: one set of graphs for slices of any length, from those of four sample slices."""
    assert ctx.plan is not None
    plan = ctx.plan = with_slices(ctx.plan, gm)
    total = token_count(gm)
    samples = sample_slices(total, _slice_unit(plan))
    made = []
    prologues = []
    for i, part in enumerate(samples):
        mesh = ctx.mesh.with_slice(part.length, part.start, part.total)
        here = Context(mesh, plan, ctx.observers if i == 0 else [], ctx.timings)
        local = PassManager(PLACEMENT_PASSES).run(copy_graph(gm), here, facts=("functional",))
        local, prologue = split_prologue(local, here)
        prologues.append(prologue)
        made.append(slice_tokens(local, here))
        here.observe("slice_tokens", local)
    if prologues[0] is not None:
        prologues[0].graph = lowered(prologues[0].graph)
        ctx.observe("prologue", prologues[0].graph)
    pipeline = _timed(ctx.timings, "pipeline", lambda: compile_sliced_pipeline(made, ctx, samples))
    local = made[0][0]
    parameters = parameter_specs(local, plan)
    return Compiled(local.meta["signature"], plan, local, None, prologues[0], parameters, True, ctx, pipeline)


def _slice_unit(plan: Plan) -> int:
    """Of what the length of a slice is a multiple: sequence parallelism cuts it again."""
    return plan.mesh.size("tp") if plan.options.sequence_parallel else 1


def with_slices(plan: Plan, gm: GraphModule) -> Plan:
    """The plan with the lengths of the token slices for a global graph."""
    assert plan.pipeline is not None
    total, unit = token_count(gm), _slice_unit(plan)

    def best() -> tuple[tuple[int, ...], str]:
        assert plan.pipeline is not None
        return best_lengths(main_parts(gm, plan.pipeline.cuts), total, plan.options.micro_batches, unit)

    lengths, reason = slice_lengths(plan.options.slices, total, unit, best)
    note = ("pipeline", f"token slices {', '.join(map(str, lengths))}: {reason}")
    return dataclasses.replace(
        plan, pipeline=dataclasses.replace(plan.pipeline, slices=lengths), notes=(*plan.notes, note)
    )


def keep_outputs(gm: GraphModule, names: Sequence[str]) -> None:
    """Drop the outputs that are not asked for; losses (scalars with a gradient) and new buffer values stay."""
    signature, out = gm.meta["signature"], output_node(gm)
    kept = [
        (spec, value)
        for spec, value in zip(signature.outputs, out.args[0], strict=True)  # type: ignore[arg-type]
        if spec.kind == "mutation" or spec.name in names or (has_gradient(value) and not value.meta["val"].dim())
    ]
    out.args = (tuple(value for _, value in kept),)
    gm.meta["signature"] = dataclasses.replace(signature, outputs=tuple(spec for spec, _ in kept))
    remove_dead_code(gm)
    gm.recompile()


def _timed(timings: dict[str, float], name: str, call: Any) -> Any:
    start = time.perf_counter()
    result = call()
    timings[name] = timings.get(name, 0.0) + time.perf_counter() - start
    return result


def parameter_specs(gm: GraphModule, plan: Plan) -> tuple[ParameterSpec, ...]:
    """What the runtime must hold, from the signature and the plan."""
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
        for s in gm.meta["signature"].inputs
        if s.kind == "parameter"
    )

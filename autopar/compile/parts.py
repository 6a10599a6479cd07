"""From a local graph to a pipeline: cut into parts, differentiate each, order the actions. Pure, as all of compiling.

local graph -> cut_stages -> per part: F, BW, B, W, G, R -> check_step_types -> schedule -> Order
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.fx import GraphModule, Node

from autopar.compile.equal_parts import KnownParts
from autopar.compile.parameter_exchanges import place_exchanges
from autopar.compile.slices import COMPUTE_GRAPHS, merged, sliced_hop
from autopar.ir.conversions import is_conversion
from autopar.ir.flow import Flow, flow_of
from autopar.ir.gradient_dtypes import summed_in
from autopar.ir.graph import placeholders
from autopar.ir.mesh import TokenSlice
from autopar.options import Options
from autopar.passes.cut_stages import Cut, PartGraph, cut_stages, uncut
from autopar.passes.differentiate import differentiate, lowered
from autopar.passes.in_order import STEP_PASSES
from autopar.passes.own_gradients import OwnGradients
from autopar.passes.parameter_graphs import gather_graph, reduce_graph
from autopar.plan import Plan
from autopar.planner.step_order import make_order
from autopar.planner.units import parts_by_node, resolve
from autopar.precision import Precision
from autopar.rewrite.compilation import Compilation, timed
from autopar.rewrite.pass_manager import PassManager
from autopar.rewrite.step_checks import check_gradients, promise
from autopar.rewrite.step_types import check_step_types
from autopar.schedule.lowering import lower
from autopar.schedule.order import Hop, Order
from autopar.schedule.simulate import simulate
from autopar.schedule.stream_checks import check_streams
from autopar.steps.graphs import Cache, Pipeline, Stage, StepGraph
from autopar.steps.of_rank import backwards, graph_name


def compile_pipeline(
    graphs: Sequence[tuple[GraphModule, list[Cache]]],
    ctx: Compilation,
    train: bool = True,
    static: int = 0,
    tangents: Sequence[str] = (),
    slices: Sequence[TokenSlice] = (),
) -> Pipeline:
    """Cut a local graph as the plan says and compile its parts. ``graphs``: it and its caches, or those of the sample
    ``slices``. ``static``: see `make_order`. ``tangents``: names of outputs that gradients come for, beside the losses,
    where there is one part.

    Raises ValueError where the graph has no such layers or the schedule does not take the number of micro-batches.
    """
    plan = ctx.plan
    assert plan is not None
    cuts = timed(ctx.timings, "cut_stages", lambda: [_cut(gm, plan, tangents, train) for gm, _ in graphs])
    known, parts, checked = KnownParts(), [], []
    for k, same in enumerate(zip(*(cut.parts for cut in cuts), strict=True)):
        if slices:
            samples = [_differentiated(part, plan.options, train, True) for part in same]
            checked.append(samples[0])  # types are of numbers; the merged graphs compute theirs
            parts.append(_finish(f"part{k}.", merged(samples, slices, graphs[0][1]), ctx, FIXED_GRAPHS))
            continue
        make = partial(_compile_part, k, same[0], cuts[0], ctx, train)
        if ctx.watched:  # sees each part; what is kept has the names that it has on ranks which nobody watches
            make = partial(_as_is, make())
        parts.append(make() if len(cuts[0].parts) == 1 else known.stage(same[0], make))
    timed(ctx.timings, "checks", lambda: check_step_types(checked or parts, graphs[0][0], ctx.mesh))
    lengths = plan.pipeline.slices if plan.pipeline is not None else ()
    hops = cuts[0].hops
    if slices:
        hops = [sliced_hop(same, slices, lengths) for same in zip(*(cut.hops for cut in cuts), strict=True)]
    order = timed(ctx.timings, "order", lambda: proven(make_order(plan, parts, hops, train, static), hops))
    return Pipeline(parts, hops, order, *_prologues(cuts[0], ctx), lengths)


def _as_is(stage: Stage) -> Stage:
    return stage


def _cut(gm: GraphModule, plan: Plan, tangents: Sequence[str], train: bool) -> Cut:
    """Of one part, gathers for each use stay within the graph, and are made again in its backward."""
    if plan.pipeline is not None:
        flow = flow_of(gm, plan.inputs)
        return cut_stages(gm, flow, place(flow, plan.pipeline.cuts), plan.pipeline.parts)
    once = train and plan.options.zero and plan.options.gathers_once
    return uncut(gm, tangents, flow_of(gm, plan.inputs).used if once else None)


def proven(order: Order, hops: Sequence[Hop]) -> Order:
    """The order, once it is known to end. Raises ScheduleError with the grid of one that would wait for ever."""
    lowered = lower(order, hops)
    simulate(lowered)
    check_streams(lowered)
    return order


def place(flow: Flow, cuts: tuple[str, ...]) -> dict[Node, int]:
    """The part of every main node. A conversion belongs to its first user, so that what is sent is not gathered yet."""
    part_of = parts_by_node(*resolve([n for n in flow.main if not is_conversion(n)], cuts))
    for node in reversed(flow.main):
        if node not in part_of:
            users = [part_of[u] for u in node.users if u in part_of]
            part_of[node] = min(users) if users else len(cuts)
    for node in flow.main:  # what leaves the model belongs to what it is made of
        if is_conversion(node) and not any(u in part_of for u in node.users):
            part_of[node] = part_of[node.args[0]]  # type: ignore[index]
    return part_of


def _compile_part(k: int, part: PartGraph, cut: Cut, ctx: Compilation, train: bool) -> Stage:
    plan = ctx.plan
    assert plan is not None
    prefix = graph_name(len(cut.parts), k, "")
    if prefix:
        with ctx.within(prefix):
            ctx.observe("part", part.graph)
    split = plan.pipeline is not None
    stage = timed(ctx.timings, "differentiate", lambda: _differentiated(part, plan.options, train, split))
    place_exchanges(stage, part.used, plan)
    return _finish(prefix, stage, ctx, (*FIXED_GRAPHS, *COMPUTE_GRAPHS))


def _differentiated(part: PartGraph, options: Options, train: bool, split: bool) -> Stage:
    """The step graphs of a part; ``split``: B and W, too."""
    results = part.results if train else dict.fromkeys(part.results, "output")
    sums = _sums(part, options.precision)
    stage = differentiate(part.graph, results, part.fixed, split, sums)
    for step in backwards(stage):
        check_gradients(step, part.graph, sums)
    stage.mutations, stage.parameters = part.mutations, part.parameters
    if part.used is not None:
        stage.gather, stage.aliases = gather_graph(part.used)
        made = stage.gather.outputs if stage.gather is not None else ()
        stage.gathered = {u.name: p.name for u, p in part.used.items() if u.name in made}
        made = [name for step in backwards(stage) for name in step.outputs]
        stage.reduce = reduce_graph(part.used, made, options.precision, added=True)
    return stage


def _sums(part: PartGraph, precision: Precision) -> dict[str, torch.dtype]:
    """Parameter -> what its gradient is summed in over ranks, where that is part of the backward."""
    if part.used is not None:
        return {}
    held = {n.name: n.meta["val"].dtype for n in placeholders(part.graph) if n.name in part.fixed}
    return {name: summed_in(dtype, precision) for name, dtype in held.items()}


FIXED_GRAPHS = ("gather", "reduce")


def _finish(prefix: str, stage: Stage, ctx: Compilation, names: Sequence[str]) -> Stage:
    """Run the passes over step graphs. (Those of token slices compute with sizes, which the passes do not know.)"""
    for name in (*FIXED_GRAPHS, *COMPUTE_GRAPHS):
        step = getattr(stage, name)
        if step is not None:
            setattr(stage, name, _finished(f"{prefix}{name}", step, ctx, name in names))
    return stage


def _finished(name: str, step: StepGraph, ctx: Compilation, simplified: bool) -> StepGraph:
    with ctx.within(f"{name}."):
        ctx.observe("differentiate", step.graph)
        graph = PassManager(STEP_PASSES if simplified else (OwnGradients(),)).run(
            promise(step.graph), ctx, facts=("step",)
        )
    ctx.observe(name, graph)
    assert len(placeholders(graph)) == len(step.inputs)
    return StepGraph(graph, step.inputs, step.outputs)


def _prologues(cut: Cut, ctx: Compilation) -> tuple[StepGraph | None, StepGraph | None]:
    found: list[StepGraph | None] = []
    for name, graph in (("once", cut.once), ("each", cut.each)):
        if graph is None:
            found.append(None)
            continue
        inputs, results = [n.name for n in placeholders(graph)], graph.meta["results"]
        step = StepGraph(lowered(graph), inputs, list(results))
        ctx.observe(name, step.graph)
        found.append(step)
    return found[0], found[1]

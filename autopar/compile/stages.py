"""From a local graph to a pipeline: split it into stages, differentiate each, order the actions. Pure, as all of
compiling.

local graph -> split_stages -> per stage: F, BW, B, W, G, R -> check_step_types -> schedule -> Order
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.ac_policies import AUTO, FUSED, MODEL, NOTHING, StageCheckpoints
from autopar.compile.slices import COMPUTE_GRAPHS, merged, sliced_edge
from autopar.compile.stage_dedup import KnownStages
from autopar.ir.compute_dtypes import summed_in
from autopar.ir.conversions import is_conversion
from autopar.ir.flow import Flow, flow_of
from autopar.ir.graph import layer_of, module_path, placeholders
from autopar.ir.mesh import TokenSlice
from autopar.passes.autodiff.backward_builder import forward_calls
from autopar.passes.autodiff.clone_aliased_grads import CloneAliasedGrads
from autopar.passes.autodiff.differentiate import Differentiated, lowered
from autopar.passes.autodiff.joint import in_pieces
from autopar.passes.pipelines import STEP_PASSES
from autopar.passes.stage.accumulate_gradients import accumulating, split_accumulation
from autopar.passes.stage.parameter_graphs import (
    gather_graph,
    inline_gathers,
    inline_reductions,
    late_reduce_graph,
    reduce_graph,
    with_gathers,
)
from autopar.passes.stage.split_stages import StageGraph, StageSplit, as_one_stage, split_stages
from autopar.passes.stage.split_statistics import split_pre_pass
from autopar.passes.step.fuse_accumulation import FuseAccumulation
from autopar.passes.step.gather_rounded import gather_rounded
from autopar.plan import Plan
from autopar.planner.pipeline.split_candidates import parts_by_node, resolve
from autopar.planner.pipeline.step_order import make_order
from autopar.precision import Precision
from autopar.rewrite.compilation import Compilation, timed
from autopar.rewrite.pass_manager import PassManager
from autopar.rewrite.step_checks import check_gradients, check_step_types, promise
from autopar.schedule.lowering import lower
from autopar.schedule.order import Order, P2PEdge
from autopar.schedule.order_checks import check_streams
from autopar.schedule.request import SCHEDULES
from autopar.schedule.simulate import simulate
from autopar.steps.graphs import Cache, GlobalStatistics, Pipeline, Stage, StepGraph, grad, is_a, of
from autopar.steps.of_rank import backwards, graph_name, sum_dtypes


class StageBuilder:
    """A local graph, split into stages; each is differentiated once, and compiled for every choice of what its backward
    recomputes."""

    def __init__(
        self,
        graphs: Sequence[tuple[GraphModule, list[Cache]]],
        ctx: Compilation,
        train: bool = True,
        static: int = 0,
        tangents: Sequence[str] = (),
        slices: Sequence[TokenSlice] = (),
        pre_pass: GraphModule | None = None,
    ) -> None:
        """``graphs``: it and its caches, or those of the sample ``slices``. ``static``: see `make_order`. ``tangents``:
        names of outputs that receive gradients, besides the losses, if there is one stage. ``pre_pass``: its graph.

        Raises ValueError where the graph has no such layers."""
        self.graphs, self.ctx, self.train, self.static, self.slices = graphs, ctx, train, static, slices
        self._pre_pass = pre_pass
        plan = self.plan
        self.splits = timed(ctx.timings, "split_stages", lambda: [_split(gm, plan, tangents) for gm, _ in graphs])
        self.parts = [same[0] for same in zip(*(split.parts for split in self.splits), strict=True)]
        self._known = KnownStages()
        self._derived: dict[tuple[int, int], Differentiated] = {}

    @property
    def plan(self) -> Plan:
        """The plan, as it is while this is compiled."""
        assert self.ctx.plan is not None
        return self.ctx.plan

    @property
    def _shares_parts(self) -> bool:
        return len(self.parts) > 1 and not self.slices

    @property
    def policy(self) -> str:
        """Name of the policy of activation checkpointing: where the model checkpoints itself, its own."""
        name = self.plan.options.ac_policy
        regions = any("ac_region" in node.meta for gm, _ in self.graphs for node in gm.graph.nodes)
        return MODEL if name == FUSED and regions else name

    def asks(self, policy: str) -> bool:
        """Whether a policy may recompute something: "model" only what is called within `torch.utils.checkpoint`, "none"
        nothing; but chunked logits and tiles are recomputed in any case."""
        nodes = [node for gm, _ in self.graphs for node in gm.graph.nodes]
        asked = policy == "model" and any("ac_region" in node.meta for node in nodes)
        return policy not in ("none", "model") or asked or any(map(in_pieces, nodes))

    def names_at(self, k: int, calls: Sequence[int]) -> list[str]:
        """The layers, or modules, of some of the `forward_calls` of a stage."""
        made = forward_calls(self.parts[k].graph)
        return [layer_of(made[i]) or module_path(made[i]) or made[i].name for i in calls]

    def first_like(self) -> list[int]:
        """Stage -> the first of the stages that are equal to it except for names."""
        if not self._shares_parts:
            return list(range(len(self.parts)))
        first: dict[Any, int] = {}
        return [first.setdefault(self._known.like(part), k) for k, part in enumerate(self.parts)]

    def derived(self, k: int, sample: int = 0) -> Differentiated:
        """The stage with its derivative."""
        if (k, sample) not in self._derived:
            if self._shares_parts:
                self._known.like(self.parts[k])  # as it is before this
            part = self.splits[sample].parts[k]
            results = part.results if self.train else dict.fromkeys(part.results, "output")
            sums, early = _sums(part, self.plan.options.precision), self.plan.loss_gradients == "forward"
            self._derived[k, sample] = Differentiated(part.graph, results, part.fixed, sums, early)
        return self._derived[k, sample]

    def make(self, checkpoints: Mapping[int, StageCheckpoints] | None = None) -> Pipeline:
        """The pipeline; ``checkpoints``: of its stages.

        Raises ValueError where the schedule does not take the number of microbatches."""
        ctx, parts, checked = self.ctx, list[Stage](), list[Stage]()
        for k, part in enumerate(self.parts):
            own = (checkpoints or {}).get(k, NOTHING)
            if self.slices:
                samples = [
                    accumulated(self._differentiated(k, i, own, True), self.splits[i].parts[k], self.plan)
                    for i in range(len(self.slices))
                ]
                checked.append(samples[0])  # types need constant sizes; the merged graphs compute theirs
                stage = merged(samples, self.slices, self.graphs[0][1])
                parts.append(_finish(f"part{k}.", stage, ctx, FIXED_GRAPHS))
                continue
            make = partial(self._compile_part, k, own)
            if ctx.watched:  # an observer sees each stage; cached ones are named as on ranks without observers
                make = partial(_as_is, make())
            parts.append(self._known.stage(part, make, (own, ctx.draft)) if self._shares_parts else make())
        if ctx.checks and not ctx.draft:
            timed(ctx.timings, "checks", lambda: check_step_types(checked or parts, self.graphs[0][0], ctx.mesh))
        lengths = self.plan.pipeline.token_slices if self.plan.pipeline is not None else ()
        edges = self.splits[0].edges
        if self.slices:
            alike = zip(*(split.edges for split in self.splits), strict=True)
            edges = [sliced_edge(samples, self.slices, lengths) for samples in alike]
        order = timed(ctx.timings, "order", lambda: proven(self._order(parts, edges), edges))
        for name, step in zip(("once", "each"), self.prologues, strict=True):
            if step is not None:
                ctx.observe(name, step.graph)
        for r, one in enumerate(self.rounds):
            for k, step in enumerate(one.graphs):
                if step is not None:
                    ctx.observe(graph_name(len(parts), k, f"pre_pass{r}"), step.graph)
        return Pipeline(parts, edges, order, *self.prologues, lengths, pre_pass=self.rounds)

    def more_in_flight(self, made: Pipeline) -> Pipeline | None:
        """The same graphs in an order that uses the memory limit for more microbatches in flight; None where the
        schedule has only one order, or no limit is low enough."""
        pipeline = self.plan.pipeline
        if pipeline is None or not SCHEDULES[pipeline.schedule].searches:
            return None
        try:
            order = make_order(self.plan, made.parts, made.edges, self.train, self.static)
        except ValueError:
            return None
        return replace(made, order=proven(order, made.edges))

    def _order(self, parts: Sequence[Stage], edges: Sequence[P2PEdge]) -> Order:
        """With recomputation under a limit, a schedule that searches must not use the memory saved for more
        microbatches in flight: that would need more recomputation."""
        options = self.plan.options
        if options.ac_policy != AUTO:
            return make_order(self.plan, parts, edges, self.train, self.static)
        free = replace(self.plan, options=replace(options, memory_limit=0, activation_checkpoint="none"))
        return make_order(free, parts, edges, self.train)

    def _compile_part(self, k: int, checkpoints: StageCheckpoints) -> Stage:
        part, ctx, plan = self.parts[k], self.ctx, self.plan
        prefix = graph_name(len(self.parts), k, "")
        if prefix:
            with ctx.within(prefix):
                ctx.observe("part", part.graph)
        split = plan.pipeline is not None
        stage = timed(ctx.timings, "differentiate", lambda: self._differentiated(k, 0, checkpoints, split))
        place_exchanges(stage, part.used, plan)
        accumulated(stage, part, plan)
        return _finish(prefix, stage, ctx, (*FIXED_GRAPHS, *COMPUTE_GRAPHS))

    def _differentiated(self, k: int, sample: int, checkpoints: StageCheckpoints, split: bool) -> Stage:
        """The step graphs of a stage; ``split``: B and W, too."""
        part, precision = self.splits[sample].parts[k], self.plan.options.precision
        stage = self.derived(k, sample).stage(split, checkpoints)
        for step in backwards(stage):
            check_gradients(step, part.graph, _sums(part, precision))
        stage.mutations, stage.parameters = part.mutations, part.parameters
        if part.used is not None:
            stage.gather, stage.aliases = gather_graph(part.used)
            made = stage.gather.outputs if stage.gather is not None else ()
            stage.gathered = {u.name: p.name for u, p in part.used.items() if u.name in made}
            made = [name for step in backwards(stage) for name in step.outputs]
            stage.reduce = reduce_graph(part.used, made, precision, added=True)
        return stage

    @cached_property
    def rounds(self) -> list[GlobalStatistics]:
        """The rounds of the pre-pass, split into stages as the model is."""
        if self._pre_pass is None:
            return []
        flow, pipeline, gm = flow_of(self._pre_pass, self.plan.inputs), self.plan.pipeline, self.graphs[0][0]
        cuts = pipeline.split_points if pipeline is not None else ()
        where = place(flow_of(gm, self.plan.inputs), cuts) if cuts else {}
        return split_pre_pass(self._pre_pass, flow, {node.name: k for node, k in where.items()}, len(self.parts))

    @cached_property
    def prologues(self) -> tuple[StepGraph | None, StepGraph | None]:
        """What all microbatches share, and what each has of its own (`Pipeline.once`, `Pipeline.each`)."""
        return _prologues(self.splits[0])


def _as_is(stage: Stage) -> Stage:
    return stage


def _split(gm: GraphModule, plan: Plan, tangents: Sequence[str]) -> StageSplit:
    """With a single stage, gathers for each use stay within the graph, and its backward repeats them."""
    if plan.pipeline is not None:
        flow = flow_of(gm, plan.inputs)
        return split_stages(gm, flow, place(flow, plan.pipeline.split_points), plan.pipeline.parts)
    once = plan.options.shards_parameters and plan.options.gathers_once
    return as_one_stage(gm, tangents, flow_of(gm, plan.inputs).used if once else None)


def proven(order: Order, edges: Sequence[P2PEdge]) -> Order:
    """The order, once it is known to terminate. Raises ScheduleError with the grid of one that deadlocks."""
    lowered = lower(order, edges)
    simulate(lowered)
    check_streams(lowered)
    return order


def place(flow: Flow, cuts: tuple[str, ...]) -> dict[Node, int]:
    """The stage of every main node. A conversion belongs to its first user, so that a value is sent before a gather."""
    part_of = parts_by_node(*resolve([n for n in flow.main if not is_conversion(n)], cuts))
    for node in reversed(flow.main):
        if node not in part_of:
            users = [part_of[u] for u in node.users if u in part_of]
            part_of[node] = min(users) if users else len(cuts)
    for node in flow.main:  # outputs belong to the stage of their operands
        if is_conversion(node) and not any(u in part_of for u in node.users):
            part_of[node] = part_of[node.args[0]]  # type: ignore[index]
    return part_of


def _sums(part: StageGraph, precision: Precision) -> dict[str, torch.dtype]:
    """Parameter -> the dtype in which its gradient is reduced over ranks, where that is part of the backward."""
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
        if ctx.plan is not None and ctx.plan.options.precision.gather:
            gather_rounded(step.graph)
        step.graph.meta["freed"] = {
            node.name
            for name, node in zip(step.inputs, placeholders(step.graph), strict=True)
            if is_a(name, "saved", "stash", "grad", "sum")
        }
        graph = PassManager(STEP_PASSES if simplified else (FuseAccumulation(), CloneAliasedGrads())).run(
            promise(step.graph), ctx, facts=("step",)
        )
    ctx.observe(name, graph)
    assert len(placeholders(graph)) == len(step.inputs)
    return StepGraph(graph, step.inputs, step.outputs)


def _prologues(split: StageSplit) -> tuple[StepGraph | None, StepGraph | None]:
    found: list[StepGraph | None] = []
    for graph in (split.once, split.each):
        if graph is None:
            found.append(None)
            continue
        inputs, results = [n.name for n in placeholders(graph)], graph.meta["results"]
        found.append(StepGraph(lowered(graph), inputs, list(results)))
    return found[0], found[1]


# --- graphs of a stage's parameters --------------------------------------------------------------------

OF_EACH = ("backward", "backward_input", "backward_weight")  # the backwards of every microbatch


def place_exchanges(stage: Stage, used: Mapping[Node, Node] | None, plan: Plan) -> None:
    """Where the gathers of parameters and the reductions of gradients run: in graphs of their own (G, R), or within F
    and the backwards.

        zero    gathers          reductions over ranks
        0                        the last backward (with stages: R)
        1       the first F      the last backward (with stages: R)
        2       the first F      every backward
        3       every graph      every backward

    Every backward runs the reductions that shard: reduce-scatters over dp (and cp). Those that leave a value unsharded
    run once per step, in the last backward or in R: all-reduces of shards over replicas (dp_replicate), which move
    2(R-1)/R of a shard (Zhao et al. 2023, PyTorch FSDP, 3.2.2), and all-reduces of gradients of replicated parameters.
    ``used``: used node -> its parameter, where G and R were split off.
    """
    options, alone = plan.options, plan.pipeline is None  # without other stages it is known which backward is the last
    last = alone and stage.backward is not None
    once = options.reduces_once and options.microbatches > 1
    late = options.microbatches > 1 and not once
    if used is not None:
        if not options.gathers_once and stage.gather is not None:
            _gather_inside(stage)
        if not once:
            _reduce_in_each(stage, used, options.precision, late)
        if last and stage.reduce is not None:
            assert stage.backward is not None  # reductions overlap with it: it takes the accumulated gradients
            stage.backward_reduce, stage.reduce = inline_reductions(stage.backward, stage.reduce, last=True), None
        if alone:
            stage.roots = _of_stored(stage.roots, used)
    elif last and (once or late):
        assert stage.backward is not None
        stage.backward, stage.backward_reduce = split_accumulation(stage.backward, options.precision, late)
    if last and options.microbatches == 1:
        stage.backward, stage.backward_reduce = None, stage.backward
    if stage.gather is not None:
        stage.gather_forward = with_gathers(stage.forward, stage.gather)


def accumulated(stage: Stage, part: StageGraph, plan: Plan) -> Stage:
    """A stage whose backwards add to the gradients of earlier microbatches and token slices, where a step has some."""
    slices = len(plan.pipeline.token_slices) if plan.pipeline is not None else 0
    held = {*part.fixed, *(p.name for p in (part.used or {}).values())}
    dtypes = {n: dtype for n, dtype in sum_dtypes(stage, plan.options.precision).items() if of(n) in held}
    for name in OF_EACH:
        step = getattr(stage, name)
        if step is not None:
            setattr(stage, name, accumulating(step, dtypes, plan.options.microbatches * max(slices, 1) > 1))
    return stage


def _gather_inside(stage: Stage) -> None:
    """Parameters are gathered by every graph that uses them, and freed in between."""
    gather = stage.gather
    assert gather is not None
    for name in ("forward", *OF_EACH):
        step = getattr(stage, name)
        setattr(stage, name, step and inline_gathers(step, gather))
    stage.gather, stage.gathered = None, {}


def _reduce_in_each(stage: Stage, used: Mapping[Node, Node], precision: Precision, late: bool) -> None:
    """Where several graphs compute gradients of one parameter, each reduces its own."""
    made: dict[str | None, None] = {}
    for name in OF_EACH:
        step = getattr(stage, name)
        reduce = reduce_graph(used, step.outputs, precision, False, late) if step is not None else None
        if reduce is not None:
            setattr(stage, name, inline_reductions(step, reduce))
            made |= dict.fromkeys(reduce.outputs)
    stage.reduce = late_reduce_graph(used, made, precision) if late else None


def _of_stored(roots: Mapping[str, list[str]], used: Mapping[Node, Node]) -> dict[str, list[str]]:
    """`Stage.roots` of stored parameters, from those of their used values."""
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(p.name for p in used.values()):
        each = [roots.get(grad(u.name)) for u, p in used.items() if p.name == name]
        if None not in each:  # else all
            found[grad(name)] = list(dict.fromkeys(start for starts in each for start in starts or ()))
    return found

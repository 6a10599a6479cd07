"""From a model to the graphs that serve it: one that runs the tokens of any requests, per pipeline stage.

    packed = compile_packed(model, batch, "input_ids", mesh, options, fixed=plan)
    packed.stages[k].graph        tokens, positions, pages of the cache -> what the next stage receives, or logits
    packed.stages[k].tables       parameters, buffers -> tables by position

The model is captured for one row of all positions per data rank. Four local graphs are built, for four pairs of sizes
(T tokens, of which N have their logits computed), and merged into one that computes its sizes (`slice_sizes`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from autopar.capture.front_end import capture
from autopar.capture.reads.compared_sizes import SizeLog
from autopar.capture.trace.compiling import compiling
from autopar.compile.any_length import check_any_length, short_of
from autopar.compile.known_masks import know_masks, mark_causal
from autopar.compile.last_token import with_all_tokens
from autopar.compile.one_token import check_one_token
from autopar.compile.parameters import normalized
from autopar.compile.partitioned_model import keep_outputs
from autopar.compile.stages import place
from autopar.compile.ways_by_length import check_other_ways
from autopar.ir.flow import flow_of
from autopar.ir.graph import (
    arguments,
    calls_of,
    copy_graph,
    describe,
    extracted,
    outputs,
    placeholders,
    placement,
    shape,
)
from autopar.ir.mesh import DATA, Mesh, TokenSlice
from autopar.ir.meta import input_specs, signature_of
from autopar.ir.placement import Shard
from autopar.ops.traits import COLLECTIVES
from autopar.options import Options
from autopar.passes.autodiff.routed_sizes import routed_sizes
from autopar.passes.pipelines import PLACEMENT_PASSES, STEP_PASSES
from autopar.passes.stage.cut_experts import cut_experts
from autopar.passes.stage.cut_layers import CutLayer
from autopar.passes.stage.cut_mlps import cut_mlps
from autopar.passes.stage.forward_only import forward_only
from autopar.passes.stage.pack_tokens import AXIS, PackedGraph, pack_tokens
from autopar.passes.stage.slice_sizes import sample_slices, symbolic
from autopar.passes.stage.split_packed import PackedPart, split_packed
from autopar.plan import Plan
from autopar.planner import make_plan
from autopar.planner.pipeline.step_order import layout, parameter_specs
from autopar.rewrite.compilation import Compilation, Observer, timed
from autopar.rewrite.pass_manager import PassManager
from autopar.rewrite.step_checks import promise
from autopar.rules import result_placements
from autopar.steps.graphs import StepGraph
from autopar.steps.packed import ROWS, TOKENS, Packed, PackedStage, SizedValue, sized_value

Apart = Literal["", "experts", "mlp"]  # what the ranks of a role of its own compute
CUTS: dict[str, Callable[[GraphModule], list[CutLayer]]] = {"experts": cut_experts, "mlp": cut_mlps}
_SIZED_ALIKE = tuple(x for x in COLLECTIVES if x is not torch.ops.autopar.all_to_all_rows.default)


@compiling
def compile_packed(
    model: nn.Module,
    batch: Mapping[str, Any],
    tokens: str,
    mesh: Mesh,
    options: Options | None = None,
    fixed: Plan | None = None,
    *,
    lift_to_float64: bool = False,
    split_kv: bool = True,
    gathers_ahead: bool = False,
    buffers: Mapping[str, Tensor] | None = None,
    observers: Sequence[Observer] = (),
    apart: Apart = "",
) -> Packed:
    """Compile a model to serve requests.

    Args:
        batch: the ids of one row of all positions per data rank, [data ranks, S]. Whatever numbers the tokens is
            computed in the forward: the positions of one document.
        tokens: the name of the ids.
        fixed: keep the placements of parameters of this plan.
        gathers_ahead: whether parameters are gathered, and cast, ahead of all steps instead of in each.
        buffers: their values, by name. Masks among them become constants, which say that attention is causal.
        split_kv: whether attention may split a request's keys over threads, so that its bits depend on its neighbours.
        apart: what other ranks compute (`autopar.compile.expert_role`): "experts", "mlp", or nothing.
    Raises ValueError, with the operator, for a model whose tokens depend on others in another way than by causal
    attention, and for sizes that do not divide.
    """
    timings: dict[str, float] = {}
    options = options or (fixed.options if fixed is not None else Options())
    options = replace(options, precision=options.precision.without_products())  # scales would span several requests
    if mesh.size("cp") > 1:
        raise ValueError(
            f"serve: requests are not sharded on their tokens, found axis cp={mesh.size('cp')} in the mesh; use tp, "
            "dp, ep or pp"
        )
    ctx = Compilation(mesh, observers=list(observers), timings=timings)
    total, logs = batch[tokens].shape[1], dict[int, SizeLog]()

    def first(count: int) -> GraphModule:
        """The graph of the first tokens."""
        logs[count] = SizeLog()
        given = {**batch, tokens: batch[tokens][:, :count]} if count < total else batch
        return timed(timings, "capture", lambda: captured(model, given, lift_to_float64, options, logs[count]))

    gm = first(total)
    ctx.observe("capture", gm)
    as_captured = copy_graph(gm)
    gm = served_graph(gm, ctx, buffers or {}, total)
    if apart:
        CUTS[apart](gm)
        ctx.observe(f"cut_{apart}", gm)
    ctx.plan = plan = timed(timings, "plan", lambda: make_plan(gm, mesh, options, fixed, train=False))
    parameters = parameter_specs(gm, plan)
    samples = [TokenSlice(s.length, s.start, total, tokens) for s in samples_of(total)]
    contexts = [ctx.of_slice(s, s is samples[0]) for s in samples]
    # Placements do not depend on the sizes, but for blocks of tokens, so they are found and checked once.
    with of_requests():
        placed = PassManager(PLACEMENT_PASSES[:-1]).run(copy_graph(gm), contexts[0], facts=("functional",))
    if _has_blocks_of_tokens(placed, mesh):
        rest = [PassManager(PLACEMENT_PASSES[:-1]).run(copy_graph(gm), c, facts=("functional",)) for c in contexts[1:]]
    else:
        rest = [copy_graph(placed) for _ in contexts[1:]]
    made = [
        _local(g, c, split_kv, gathers_ahead, c is contexts[0])
        for g, c in zip([placed, *rest], contexts, strict=True)
    ]  # fmt: skip
    packed, vocabulary_axes = made[0][0], made[0][2]
    if not packed.layers:
        raise ValueError(
            f"serve: needs causal attention, found none in {type(model).__name__}; generate with the model itself"
        )
    with of_requests():
        stages = timed(timings, "merge", lambda: _stages([(p, parts) for p, parts, _ in made], samples, ctx))
    for stage, rank in zip(stages, _ranks(plan), strict=True):
        stage.rank = rank
    # Last, since a refusal of an operator says more.
    _check_lengths(first, as_captured, logs, total, tokens, buffers or {}, ctx)
    return Packed(
        signature_of(gm), plan, stages, parameters, tokens,
        max_length=total,
        windows=packed.windows,
        vocabulary=shape(outputs(gm)[0])[-1],
        vocabulary_axes=vocabulary_axes,
        equal_sizes=_equal_sizes([parts for _, parts, _ in made]),
        constants=dict(gm.meta.get("constants", {})),
        timings=timings,
    )  # fmt: skip


def _check_lengths(
    first: Callable[[int], GraphModule],
    whole: GraphModule,
    logs: Mapping[int, SizeLog],
    total: int,
    tokens: str,
    buffers: Mapping[str, Tensor],
    ctx: Compilation,
) -> None:
    """Raises ValueError for a forward that computes otherwise for some number of tokens. ``first`` captures some of the
    first tokens, ``whole`` is the graph of all."""
    short = short_of(total)

    def check(count: int) -> GraphModule:
        shorter = first(count)
        timed(ctx.timings, "lengths", lambda: check_any_length(whole, shorter, total, count, tokens, buffers))
        return shorter

    several, single = check(short), first(1)
    few, one = (served_graph(x, Compilation(ctx.mesh), buffers, n) for x, n in ((several, short), (single, 1)))
    timed(ctx.timings, "lengths", lambda: check_one_token(few, one, total, tokens, buffers))
    check_other_ways(logs, check, total)


@contextlib.contextmanager
def of_requests() -> Iterator[None]:
    """Context manager: what cannot run token slice by token slice cannot run tokens of several requests either."""
    try:
        yield
    except ValueError as error:
        text, _, found = str(error).partition(": ")
        if text != "token_slices":
            raise
        why = found.rpartition("; ")[0].removesuffix(", so this model cannot run slice by slice")
        raise ValueError(
            f"serve: {why.replace('slices of', 'steps of')}, so requests cannot be generated from its graph; generate "
            "with the model itself"
        ) from error


def captured(
    model: nn.Module,
    batch: Mapping[str, Any],
    lift_to_float64: bool,
    options: Options,
    sizes: SizeLog | None = None,
) -> GraphModule:
    """The graph of a forward without gradients, as captured; ``sizes`` notes what it decides by sizes."""
    how: dict[str, Any] = {"lift_to_float64": lift_to_float64, "precision": options.precision, "sizes": sizes}
    return capture(model, batch, train=False, grad_mode="no_grad", **how)


def served_graph(gm: GraphModule, ctx: Compilation, buffers: Mapping[str, Tensor], total: int) -> GraphModule:
    """The normalized graph that computes the logits of all ``total`` tokens of a row, and nothing else. Raises
    ValueError for a model without such logits, and for one that draws random numbers."""
    know_masks(gm, buffers)
    name, logits = _logits_of(gm)
    logits = with_all_tokens(gm, logits, total)
    if len(shape(logits)) != 3 and total > 1:  # of one token, those of the last one are all
        raise ValueError(
            f"serve: needs logits [rows, tokens, vocabulary], found {list(shape(logits))}; return those of all tokens"
        )
    gm = normalized(gm, ctx)
    mark_causal(gm)
    keep_outputs(gm, [name])
    _check_random(gm)
    return gm


def samples_of(total: int, unit: int = 1) -> tuple[TokenSlice, ...]:
    """Numbers of tokens, multiples of ``unit``, that graphs are built for. Raises ValueError for too few in all."""
    try:
        return sample_slices(total, unit)
    except ValueError:
        raise ValueError(f"serve: needs a max_length of at least 9 tokens, found {total // unit}; raise it") from None


def _logits_of(gm: GraphModule) -> tuple[str, Node]:
    """Name and value of the output that is the logits: "logits", or the only one."""
    found = {s.name: x for s, x in zip(signature_of(gm).outputs, outputs(gm), strict=True) if s.kind == "output"}
    written = [s.name for s in signature_of(gm).outputs if s.kind == "mutation"]
    if written:
        raise ValueError(
            f"serve: the forward writes buffer {written[0]} in eval mode, which requests would share; generate with "
            "the model itself"
        )
    named = [name for name in found if name == "logits" or name.endswith(".logits")]
    if len(named or found) != 1:
        raise ValueError(f"serve: needs one output with logits, found {', '.join(found)}; return it as 'logits'")
    (name,) = named or found
    return name, found[name]


def _check_random(gm: GraphModule) -> None:
    """Raises ValueError for a model that draws numbers in eval mode."""
    seeds = {node for node in placeholders(gm) if input_specs(gm)[node.name].kind == "seed"}
    for node in gm.graph.nodes:
        if any(x in seeds for x in node.all_input_nodes):
            raise ValueError(
                f"serve: {describe(node)} draws random numbers in eval mode, so a request's tokens would depend on its "
                "company; generate with the model itself"
            )


def _check_rows(logits: Node) -> None:
    """Raises ValueError for logits that are not [rows, tokens, vocabulary]."""
    where = placement(logits, AXIS)
    if not (isinstance(where, Shard) and where.dim == 1):
        found = f"tokens in dim {where.dim}" if isinstance(where, Shard) else "none of tokens"
        raise ValueError(
            f"serve: needs logits [rows, tokens, vocabulary], found {found} of {describe(logits)}; return those of all "
            "tokens"
        )


def _local(
    gm: GraphModule, ctx: Compilation, split_kv: bool, gathers_ahead: bool, checked: bool
) -> tuple[PackedGraph, list[PackedPart], tuple[str, ...]]:
    """The packed graph of one pair of sizes, its stages, and the axes that shard the vocabulary."""
    plan, part = ctx.plan, ctx.mesh.slice
    assert plan is not None and part is not None
    lower = PLACEMENT_PASSES[-1]
    if checked:
        gm = PassManager((lower,)).run(gm, ctx, facts=("functional", "placements"))
    else:
        gm = timed(ctx.timings, lower.name, lambda: lower.apply(gm, ctx))
    flow = flow_of(gm, plan.inputs)
    cuts = plan.pipeline.split_points if plan.pipeline is not None else ()
    where = place(flow, cuts) if cuts else dict.fromkeys(flow.main, 0)
    _check_rows(outputs(gm)[0])
    axes = _vocabulary_axes(gm, ctx.mesh)
    packed = timed(ctx.timings, "pack_tokens", lambda: pack_tokens(gm, part, split_kv, gathers_ahead))
    ctx.observe("pack_tokens", packed.main)
    where |= {new: where[old] for old, new in packed.replaced.items() if old in where}
    parts = split_packed(packed.main, where, len(cuts) + 1)
    for i, one in enumerate(parts):
        with ctx.within(f"part{i}." if len(parts) > 1 else ""):
            graph = forward_only(one.graph)
            routed_sizes(graph)
            one.graph = PassManager(STEP_PASSES).run(promise(graph), ctx, facts=("step",))
    return packed, parts, axes


def _has_blocks_of_tokens(gm: GraphModule, mesh: Mesh) -> bool:
    """Whether a dim of tokens is sharded in blocks, whose sizes are numbers of tokens: rows [B * T] over two axes."""
    others = [axis for axis in mesh.cut_order if axis != AXIS]
    for node in gm.graph.nodes:
        tokens = placement(node, AXIS) if isinstance(node.meta.get("val"), Tensor) else None
        if not isinstance(tokens, Shard):
            continue
        for where in (placement(node, axis) for axis in others):
            if isinstance(where, Shard) and where.dim == tokens.dim and where.blocks:
                return True
    return False


def _vocabulary_axes(gm: GraphModule, mesh: Mesh) -> tuple[str, ...]:
    (logits,) = outputs(gm)
    found = {axis: result_placements(logits, axis)[0] for axis in mesh.cut_order if axis != "sl"}
    return tuple(axis for axis, p in found.items() if isinstance(p, Shard) and p.dim == 2)


def _stages(
    made: Sequence[tuple[PackedGraph, list[PackedPart]]], samples: Sequence[TokenSlice], ctx: Compilation
) -> list[PackedStage]:
    first, stages = made[0][0], list[PackedStage]()
    layers = {layer.keys: layer for layer in first.layers}
    sent: list[SizedValue] = []
    for k, part in enumerate(made[0][1]):
        graphs = [parts[k].graph for _, parts in made]
        graph = symbolic(graphs, samples)
        received, ends = sent, [outputs(g) for g in graphs]
        known = {value.name: value for value in received}
        for i, (name, x) in enumerate(zip(part.outputs, ends[0], strict=True)):
            known[name] = sized_value(name, x.meta["val"].dtype, [shape(end[i]) for end in ends], samples)
        sent = [known[name] for name in part.sent]
        step = StepGraph(graph, [*part.inputs, TOKENS, ROWS], list(part.outputs))
        mine = [layers[name] for name in part.inputs if name in layers]
        tables = _tables(first, part.inputs)
        stages.append(PackedStage(step, received, sent, mine, tables))
        with ctx.within(f"part{k}." if len(made[0][1]) > 1 else ""):
            if tables is not None:
                ctx.observe("tables", tables.graph)
            ctx.observe("packed", graph)
    return stages


def _equal_sizes(made: Sequence[list[PackedPart]]) -> bool:
    """Whether ranks with different tokens exchange values whose sizes depend on the number of these."""
    for parts in zip(*made, strict=True):
        for nodes in zip(*(calls_of(part.graph.graph, *_SIZED_ALIKE) for part in parts), strict=True):
            known = arguments(nodes[0])
            if set(known["axis"].split(",")) & set(DATA) and len({shape(arguments(n)["x"]) for n in nodes}) > 1:
                return True
    return False


def _tables(packed: PackedGraph, inputs: Sequence[str]) -> StepGraph | None:
    """The graph of the tables that a stage uses."""
    wanted = [name for name in packed.table_names if name in inputs]
    if packed.tables is None or not wanted:
        return None
    values = dict(zip(packed.table_names, outputs(packed.tables), strict=True))
    gm = extracted(packed.tables, [values[name] for name in wanted], "Tables")
    return StepGraph(forward_only(gm), [n.name for n in placeholders(gm)], list[str | None](wanted))


def _ranks(plan: Plan) -> list[int]:
    """The coordinates on pp of the stages."""
    if plan.pipeline is None:
        return [0]
    order = layout(plan.pipeline, plan.mesh)
    return [order.rank_of[stage] for stage in order.chains[0]]

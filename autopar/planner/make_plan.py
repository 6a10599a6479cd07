"""`make_plan`: every decision about a graph on a mesh."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.attention.operator import FACT_NAMES
from autopar.cost.axis_shares import axis_shares
from autopar.cost.hardware import Links, device_of
from autopar.ir.batch import BatchDims
from autopar.ir.graph import arguments, calls_of, global_shape
from autopar.ir.mesh import DATA, Mesh
from autopar.ir.meta import input_specs
from autopar.ir.placement import INVARIANT, REPLICATE, Placement, Shard, nested_shape, shard_of_size
from autopar.ir.signature import InputSpec
from autopar.ops.kernels import expected_kernel
from autopar.ops.kernels.chips import MODERN
from autopar.ops.mask_spec import MaskSpec
from autopar.ops.padded_pieces import shares_text
from autopar.options import Options
from autopar.plan import UNCLEAR, ParameterPlan, Plan, Stream, graph_digest
from autopar.planner.assumed_documents import document_notes
from autopar.planner.batch_dims import decide_batch_dims, whole_over_microbatches
from autopar.planner.computed_weights import sharded_sources, spread
from autopar.planner.context_parallel import ContextPlan, plan_context
from autopar.planner.experts.expert_axis import expert_axis, kept_axis
from autopar.planner.experts.expert_plan import (
    DRAWS,
    capacity_notes,
    check_draws,
    expert_notes,
    expert_parameters,
    plan_experts,
)
from autopar.planner.factor_propagation import Analysis
from autopar.planner.one_hot_experts import one_hot_experts
from autopar.planner.pipeline.pipeline_plan import main_parts, plan_pipeline
from autopar.planner.pipeline.slice_lengths import best_lengths, slice_lengths, slice_unit, token_count
from autopar.planner.pipeline.step_order import parameter_specs
from autopar.planner.plan_fits import check_fits, check_names, check_used
from autopar.planner.recurrences import plan_recurrences
from autopar.planner.scaled_products import plan_products, product_notes
from autopar.planner.shared_encoders import share_encoders
from autopar.planner.tensor_parallel import TensorParallel, find_streams, plan_tensor_parallel
from autopar.rules.derived import MADE_OF_PARAMETERS, DerivedRule, text_of
from autopar.schedule.request import SCHEDULES

ONCE, EACH = "once per step", "right before use"  # when parameters are gathered


def make_plan(
    gm: GraphModule,
    mesh: Mesh,
    options: Options | None = None,
    fixed: Plan | None = None,
    *,
    train: bool = True,
    example: bool = False,
) -> Plan:
    """Decide everything for a normalised global graph.

    ``fixed``: an earlier plan of the same parameters (another input shape); its parameter placements, batch dims,
    schedule and split points are kept. ``train``: for a step with gradients; an evaluation runs no token slices.
    ``example``: the graph of an example batch, to place parameters by; what each batch decides for itself
    (microbatches, sequence parallelism, token slices) is left open, and inputs with an uncertain batch dim get a note.
    Raises ValueError for sizes that do not divide and for a plan of other parameters.
    """
    asked, digest = options or Options(), graph_digest(gm)
    check_names(asked)
    check_used(asked, mesh)
    _check(mesh, digest, fixed)
    options = dataclasses.replace(asked, sequence_parallel=False, microbatches=1, replicas=1) if example else asked
    if fixed is not None:
        check_fits(dataclasses.replace(fixed, inputs={}), gm)
    names = {n: s.name for n, s in _nodes(gm) if s.kind == "parameter"}
    parameters: dict[str, dict[str, ParameterPlan]] = {name: {} for name in names.values()}
    notes: list[tuple[str, str]] = []
    streams: tuple[Stream, ...] = ()
    pieces: dict[str, Placement] = {}
    context = plan_context(gm, mesh, options) if mesh.size("cp") > 1 else ContextPlan()
    check_draws(gm, mesh, asked.all_microbatches)
    own, why = expert_axis(gm, mesh, asked) if fixed is None else (kept_axis(asked, fixed), "")
    one_hot = one_hot_experts(gm, mesh, names) if own == "ep" else {}
    experts = plan_experts(gm, mesh, asked, own, one_hot)
    stored = {*expert_parameters(gm, names, experts), *one_hot}
    notes += [("experts", why)] if why else []
    if mesh.size("tp") > 1:
        chosen = _over_tp(gm, mesh, names, fixed, parameters, stored if own == "tp" else ())
        pieces |= chosen.weight_pieces
        notes += chosen.notes
        notes += _refusals(parameters, chosen.refused, {name: len(global_shape(n)) for n, name in names.items()})
        if options.sequence_parallel:
            streams = find_streams(gm, chosen.contractions, mesh, "tp", context.chunks(mesh.size("cp")))
    over_tp = {n: _shard(parameters[name], "tp") for n, name in names.items()}
    placed = train or fixed is not None  # what is served alone would exchange weights for each token
    computed = sharded_sources(gm, mesh, names, experts, over_tp) if placed else {}
    of_experts = {n: _of_expert(n, mesh, own) for n, name in names.items() if name in stored}
    of_experts |= {n: ParameterPlan(p, p, spread(own)) for found in computed.values() for n, p in found.items()}
    for axis in ("ep", "cp", "dp", "dp_replicate"):  # the order of sharding: ep before cp before dp
        for node, name in names.items() if mesh.size(axis) > 1 else ():
            p = _data_parallel(node, parameters[name], options, mesh, axis, own, of_experts.get(node))
            parameters[name][axis] = p if fixed is None else fixed.parameter(name, axis)
    if options.all_microbatches > 1:
        for axes in parameters.values():
            axes["mb"] = ParameterPlan(INVARIANT, REPLICATE, "gradients of microbatches are accumulated")
    dims = _batch_dims(gm, mesh, asked, fixed)
    parts = mesh.data_size * options.all_microbatches
    met = whole_over_microbatches(gm, dims, parts) if options.all_microbatches > 1 else {}
    notes += [(f"input {name}", f"whole in each microbatch: its rows meet in {where}") for name, where in met.items()]
    inputs = _inputs(gm, mesh, options.all_microbatches, dims, met)
    if mesh.size("cp") > 1:
        recurrences, whole = plan_recurrences(gm, mesh, options, context.streams)
        context.streams += recurrences
        notes += whole
    streams += tuple(context.streams)
    notes += [] if example else capacity_notes(gm, asked)
    notes += [*product_notes(gm, asked.precision), *document_notes(gm, asked)]
    notes += [*context.notes, *expert_notes(gm, mesh, asked, experts, computed), *kernel_notes(gm), *derived_notes(gm)]
    plan = Plan(
        mesh, digest, options, parameters, inputs, streams, tuple(notes), weight_pieces=pieces,
        attention=context.attention, experts=experts, batch_dims=dims,
        draws=any(n.target in DRAWS for n in gm.graph.nodes), products=plan_products(gm, asked.precision),
    )  # fmt: skip
    if fixed is not None and fixed.overrides:
        known = {n: axes for n, axes in fixed.overrides.items() if n in plan.parameters or n in plan.inputs}
        plan = plan.override(known)
        check_fits(plan, gm)
    plan = share_encoders(gm, plan, options)
    if mesh.size("pp") > 1:
        plan = _with_pipeline(plan, gm, asked, fixed, sliced=train and not example, placed=not example)
    unclear = gm.meta.get("unclear_batch_dims", []) if example and mesh.data_size > 1 else []
    plan = _with_notes(plan, [(f"input {name}", UNCLEAR) for name in unclear])
    return dataclasses.replace(plan, shares=axis_shares(gm, plan))


def _over_tp(
    gm: GraphModule,
    mesh: Mesh,
    names: dict[Node, str],
    fixed: Plan | None,
    parameters: dict[str, dict[str, ParameterPlan]],
    of_experts: Collection[str],
) -> TensorParallel:
    """Enter into ``parameters`` how each is sharded on tp, ``of_experts`` by expert. Raises ValueError if none is."""
    keep = {n: p.stored for n, name in names.items() if isinstance((p := _fixed(fixed, name, "tp")).stored, Shard)}
    by_expert = {
        n: shard_of_size(0, global_shape(n)[0], mesh.size("tp")) for n, name in names.items() if name in of_experts
    }
    chosen = plan_tensor_parallel(Analysis(gm, mesh, "tp"), names, keep, by_expert)
    chosen.parameters |= {names[n]: _of_expert(n, mesh, "tp") for n in by_expert}
    for name, decision in chosen.parameters.items():
        parameters[name]["tp"] = decision
    if fixed is not None:
        for name in parameters:
            parameters[name]["tp"] = fixed.parameter(name, "tp")
    if not any(isinstance(p.stored, Shard) for axes in parameters.values() for p in axes.values()):
        raise ValueError(_nothing_to_cut(chosen.refused, mesh))
    return chosen


def _with_pipeline(
    plan: Plan, gm: GraphModule, options: Options, fixed: Plan | None, sliced: bool, placed: bool
) -> Plan:
    """The plan with the stages of its pipeline; ``sliced``: with token slices, too, if its schedule runs them.
    ``placed``: parameters are already where ``fixed`` says."""
    known = fixed.pipeline if fixed is not None else None
    pipeline, notes = plan_pipeline(gm, plan.mesh, options, parameter_specs(gm, plan), known, placed)
    if sliced and SCHEDULES[pipeline.schedule].sliced:
        total, unit = token_count(gm), slice_unit(options, plan.mesh)

        def best() -> tuple[tuple[int, ...], str]:
            links, parts = Links.of(options, plan.mesh).axis("pp"), main_parts(gm, pipeline.split_points)
            return best_lengths(parts, total, options.microbatches, unit, links.topology, device_of(options))

        lengths, reason = slice_lengths(options.token_slices, total, unit, best)
        pipeline = dataclasses.replace(pipeline, token_slices=lengths)
        notes.append(("pipeline", f"token slices {', '.join(map(str, lengths))}: {reason}"))
    if SCHEDULES[pipeline.schedule].sliced:
        plan = dataclasses.replace(plan, parameters=_gathered_once(plan.parameters))
    return _with_notes(dataclasses.replace(plan, pipeline=pipeline), notes)


def _gathered_once(parameters: Mapping[str, Mapping[str, ParameterPlan]]) -> dict[str, dict[str, ParameterPlan]]:
    """All token slices use parameters that are gathered once, whatever the options say."""
    return {
        name: {axis: dataclasses.replace(p, reason=p.reason.replace(EACH, ONCE)) for axis, p in axes.items()}
        for name, axes in parameters.items()
    }


def _with_notes(plan: Plan, notes: Sequence[tuple[str, str]]) -> Plan:
    return dataclasses.replace(plan, notes=(*plan.notes, *notes))


def _check(mesh: Mesh, digest: str, fixed: Plan | None) -> None:
    """Raises ValueError for axes that cannot be planned, and for an earlier plan of other parameters or meshes."""
    mesh.planned()
    if fixed is not None and fixed.graph not in (digest, ""):
        raise ValueError(
            f"plan: made for a graph with parameters {fixed.graph}, this one has {digest}; make a new plan"
        )
    if fixed is not None and fixed.mesh != mesh:
        raise ValueError(f"plan: made for the mesh {fixed.mesh}, this one is {mesh}; make a new plan")


def _nodes(gm: GraphModule) -> list[tuple[Node, InputSpec]]:
    """Placeholders with their specs."""
    specs = input_specs(gm)
    return [(n, specs[n.name]) for n in gm.graph.nodes if n.op == "placeholder"]


def _fixed(plan: Plan | None, name: str, axis: str) -> ParameterPlan:
    return plan.parameter(name, axis) if plan is not None else ParameterPlan()


def _shard(axes: Mapping[str, ParameterPlan], axis: str) -> Shard | None:
    stored = axes[axis].stored if axis in axes else None
    return stored if isinstance(stored, Shard) else None


def _of_expert(node: Node, mesh: Mesh, axis: str) -> ParameterPlan:
    shard = shard_of_size(0, global_shape(node)[0], mesh.size(axis))
    padded = f"; {shares_text(shard.units, mesh.size(axis))}" if shard.units else ""
    return ParameterPlan(shard, shard, f"experts are sharded on {axis}; each rank has its own{padded}")


def _data_parallel(
    node: Node,
    axes: Mapping[str, ParameterPlan],
    options: Options,
    mesh: Mesh,
    axis: str,
    expert_axis: str,
    of_experts: ParameterPlan | None,
) -> ParameterPlan:
    """A parameter on an axis whose ranks have different samples or tokens. DDP: replicated, the gradient is
    all-reduced. ZeRO: sharded on the first dim that divides, else on the largest, padded; gathered for use. Never
    sharded on dp_replicate, whose ranks hold the same shards. ``of_experts``: for weights of experts, how they are
    sharded on ``expert_axis``: an axis that shards before it must not shard the same dim."""
    if axis == expert_axis and of_experts is not None:
        return of_experts
    if axis == "dp_replicate":
        return ParameterPlan(INVARIANT, REPLICATE, "the same on all replicas; gradients are summed")
    if not options.shards_parameters:
        return ParameterPlan(INVARIANT, REPLICATE, "replicated; gradients are summed")
    if len(global_shape(node)) < 2:
        return ParameterPlan(INVARIANT, REPLICATE, "a vector: too small to gather; gradients are summed")
    order, at = list(mesh.cut_order), list(mesh.cut_order).index(axis)
    shape = nested_shape(
        global_shape(node), {a: p.stored for a, p in axes.items()}, {a: mesh.cut_order[a] for a in order[:at]}
    )
    ranks = mesh.size(axis)
    later = of_experts.stored if of_experts is not None and expert_axis in order[at + 1 :] else None
    free = [d for d in range(len(shape)) if not (isinstance(later, Shard) and later.dim == d)]
    for dim in free:
        if shape[dim] % ranks == 0:
            when = ONCE if options.gathers_once else EACH
            return ParameterPlan(Shard(dim), REPLICATE, f"gathered {when}, gradients scattered")
    dim = max(free, key=lambda d: shape[d])
    if shape[dim] > ranks:
        when = ONCE if options.gathers_once else EACH
        padded = f"no dim of {tuple(shape)} divides: {shares_text(shape[dim], ranks)}"
        return ParameterPlan(Shard(dim, units=shape[dim]), REPLICATE, f"{padded}; gathered {when}, gradients scattered")
    return ParameterPlan(INVARIANT, REPLICATE, f"no dim of {tuple(shape)} is as large as {ranks}; replicated")


def _inputs(
    gm: GraphModule, mesh: Mesh, microbatches: int, dims: BatchDims, met: Collection[str]
) -> dict[str, dict[str, Placement]]:
    """The batch is sharded on its dim: on dp, dp_replicate, microbatches (but for those that ``met``), and then ep, so
    that gathering over ep gives a shard of all the others."""
    tensors = {s.name: n for n, s in _nodes(gm) if s.kind == "input"}
    sizes = {axis: mesh.size(axis) for axis in DATA} | {"mb": microbatches}
    out: dict[str, dict[str, Placement]] = {}
    for name, node in tensors.items():
        dim, cuts = dims.get(name), {a: n for a, n in sizes.items() if n > 1 and not (a == "mb" and name in met)}
        pieces = math.prod(cuts.values())
        rows = global_shape(node)[dim] if dim is not None else pieces
        if rows % pieces or not rows:
            raise ValueError(
                f"data_parallel: the batch of {rows} (dim {dim} of input {name}) does not divide into {pieces} pieces "
                f"({_of_ranks(mesh)}, {microbatches} microbatches); use a batch of "
                f"{max(-(-rows // pieces), 1) * pieces}{_another_dim(name, dim)}"
            )
        out[name] = dict.fromkeys(cuts, Shard(dim)) if dim is not None else {}
        if dim is not None and "ep" in cuts:
            others = pieces // cuts["ep"]
            out[name]["ep"] = Shard(dim, (rows // others,) * others)
    return out


def _another_dim(name: str, dim: int | None) -> str:
    """Where the batch may have been mistaken: a model that loops over its examples shows no batch dim."""
    return f", or if dim {dim} isn't the batch, say which is: batch_dims={{{name!r}: 0, ...}}" if dim else ""


def _of_ranks(mesh: Mesh) -> str:
    named = [f"axis {axis!r} of size {mesh.size(axis)}" for axis in reversed(DATA) if axis in mesh.sizes]
    return ", ".join(named) or "axis 'dp' of size 1"


def _batch_dims(gm: GraphModule, mesh: Mesh, options: Options, fixed: Plan | None) -> dict[str, int | None]:
    """Which dim of each input is the batch; empty if the batch is not split."""
    if mesh.data_size == options.all_microbatches == 1:
        return {}
    return decide_batch_dims(gm, options, fixed)


def _refusals(
    parameters: Mapping[str, Mapping[str, ParameterPlan]],
    refused: Mapping[tuple[str, int], str],
    ranks: Mapping[str, int],
) -> list[tuple[str, str]]:
    """Why weights are replicated: a reason for each matrix that no decision shards."""
    out = []
    for name, axes in parameters.items():
        if ranks[name] > 1 and not isinstance(axes.get("tp", ParameterPlan()).stored, Shard):
            why = "; ".join(f"dim {d}: {r}" for (n, d), r in refused.items() if n == name)
            out.append((name, f"replicated on tp: {why or 'excluded by a cheaper sharding of its neighbours'}"))
    return out


def _nothing_to_cut(refused: Mapping[tuple[str, int], str], mesh: Mesh) -> str:
    shown = "; ".join(f"{name} dim {dim}: {why}" for (name, dim), why in list(refused.items())[:3])
    ways = f"{shown}; choose another size" if shown else "it has none with two dims; use another axis"
    return f"tensor_parallel: no weight can be sharded on axis 'tp' of size {mesh.size('tp')}: {ways}"


# --- notes ---------------------------------------------------------------------------------------------

PACKAGE, OWN = "flash_attn", "triton_flash"
_OR_PACKAGE = ", or in that of the package flash-attn where it is installed (extra flash)"
_PLAIN = "unfused on GPUs, with all scores in memory at once"


def kernel_notes(gm: GraphModule) -> list[tuple[str, str]]:
    """("attention", how many and why) for a normalised global graph, one note per reason."""
    nodes = calls_of(gm.graph, torch.ops.autopar.attention.default)
    counts = Counter(why for node in nodes if (why := _why_plain(node)))
    return [("attention", f"{count} of {len(nodes)} {why}") for why, count in counts.items()]


def _why_plain(node: Node) -> str:
    """Why no fused kernel of torch runs it; empty if one does, or for float64, which nobody trains with on GPUs."""
    args: dict[str, Any] = torch.fx.node.map_arg(arguments(node), lambda n: n.meta["val"])
    q, k, v, facts = args["q"], args["k"], args["v"], MaskSpec(*(args[name] for name in FACT_NAMES))
    if q.dtype == torch.float64:
        return ""
    if facts.dropout:
        return f"{_PLAIN}: no fused kernel has position-based dropout of probabilities; without dropout they are fused"
    chosen = expected_kernel(MODERN, q, k, v, facts, without=(PACKAGE,))
    if chosen == "math":
        return f"{_PLAIN}: no fused kernel supports the combination of {_facts(q, v, facts)}"
    if chosen == OWN:
        packaged = expected_kernel(MODERN, q, k, v, facts) == PACKAGE
        return "on GPUs fused in autopar's own kernel" + (_OR_PACKAGE if packaged else "")
    return ""


def _facts(q: torch.Tensor, v: torch.Tensor, facts: MaskSpec) -> str:
    """'softcap, bias, float32, widths 300 and 300'"""
    names = ("softcap", "bias", "key_mask", "segments", "window", "chunk", "offset")
    given = [name.replace("_", " ") for name in names if getattr(facts, name) not in (None, 0, 0.0)]
    dtype = str(q.dtype).removeprefix("torch.")
    return ", ".join([*given, dtype, f"widths {q.shape[-1]} and {v.shape[-1]}"])


def derived_notes(gm: GraphModule) -> list[tuple[str, str]]:
    """("rules", operator and its derived rule) for a normalised global graph, each once."""
    found: Counter[str] = Counter()
    for node in gm.graph.nodes:
        derived = node.meta.get("derived")
        if derived == MADE_OF_PARAMETERS:
            found[f"{node.target}: computed from parameters alone, replicated"] += 1
        elif isinstance(derived, DerivedRule):
            found[f"{node.target}: derived: {text_of(node)}"] += 1
    return [("rules", text if count == 1 else f"{text}, {count} times") for text, count in found.items()]

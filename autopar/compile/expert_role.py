"""From a model to the graphs of the experts' role: one per layer, which answers `autopar::ask_experts`.

    packed = compile_experts(model, batch, "input_ids", Mesh.of(ep=2, tp=2))
    packed.layers[k].graph        x, expert, weights, parameters -> y

The cut is that of `compile_packed(..., apart=...)`. Each layer is a model of its own, whose inputs are the same on all
ranks: experts (or the width of an MLP) are sharded on ep, and each expert on tp. A node's y is its addend to the sum
over ep, which the asking rank computes. Sizes become those of any T as in `autopar.compile.serving`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from autopar.capture.trace.compiling import compiling
from autopar.compile.serving import CUTS, Apart, captured, of_requests, samples_of, served_graph
from autopar.ir.conversions import conversion_of, is_conversion
from autopar.ir.expert_layers import dispatches
from autopar.ir.graph import arguments, copy_graph, describe, insert_call, output_node, outputs, placeholders, shape
from autopar.ir.mesh import Mesh, TokenSlice
from autopar.ir.meta import names_of_parameters, signature_of
from autopar.ir.placement import Shard, conversion
from autopar.options import Options
from autopar.passes.autodiff.routed_sizes import routed_sizes
from autopar.passes.pipelines import PLACEMENT_PASSES, STEP_PASSES
from autopar.passes.stage.cut_layers import GIVEN, CutLayer, alike
from autopar.passes.stage.forward_only import forward_only
from autopar.passes.stage.slice_sizes import LENGTH, symbolic
from autopar.plan import Plan
from autopar.planner import make_plan
from autopar.planner.factor_propagation import Analysis
from autopar.planner.pipeline.step_order import parameter_specs
from autopar.planner.tensor_parallel import plan_tensor_parallel
from autopar.rewrite.compilation import Compilation, Observer, timed
from autopar.rewrite.pass_manager import PassManager
from autopar.rewrite.step_checks import promise
from autopar.steps.graphs import StepGraph
from autopar.steps.packed_experts import ExpertLayer, PackedExperts
from autopar.token_dispatchers import TOKEN_DISPATCHERS

aten = torch.ops.aten
NODES, WITHIN = "ep", "tp"  # the axes of this role
GATHERED = next(name for name, row in TOKEN_DISPATCHERS.items() if row.gathers)  # each node has all tokens


@compiling
def compile_experts(
    model: nn.Module,
    batch: Mapping[str, Any],
    tokens: str,
    mesh: Mesh,
    options: Options | None = None,
    *,
    apart: Apart = "experts",
    lift_to_float64: bool = False,
    buffers: Mapping[str, Tensor] | None = None,
    observers: Sequence[Observer] = (),
) -> PackedExperts:
    """Compile the experts of a model for the ranks that hold them.

    Args:
        batch: the ids of one row, [1, S].
        tokens: the name of the ids.
        mesh: axis ep over nodes, axis tp within one.
        apart: "experts", or "mlp" for the MLPs of a dense model, whose width is sharded over nodes.
        buffers: as for `compile_packed`.
    Raises ValueError for other axes, for experts that do not divide over the nodes, and
    where `cut_experts` does.
    """
    timings: dict[str, float] = {}
    options, unit = options or Options(), mesh.size(NODES) if apart == "experts" else 1
    _check_axes(mesh)
    ctx = Compilation(mesh, observers=list(observers), timings=timings)
    rows = {name: x.expand(unit, *x.shape[1:]) if name == tokens else x for name, x in batch.items()}
    gm = timed(timings, "capture", lambda: captured(model, rows, lift_to_float64, options))
    ctx.observe("capture", gm)
    gm = served_graph(gm, ctx, buffers or {}, batch[tokens].shape[1])
    layers = CUTS[apart](gm)
    sizes = [_sizes(layer) for layer in layers]
    for num_experts in {of_layer["num_experts"] for of_layer in sizes}:
        _check_divides(num_experts, mesh.size(NODES))
    first = alike(layers)
    made = {k: _compiled(layers[k], ctx, k, options, unit) for k in dict.fromkeys(first)}
    parameters = {}
    for k, layer in enumerate(layers):
        plan = made[first[k]][1]
        known = dict(zip(layers[first[k]].names, layer.names, strict=True))
        of_first = {spec.name: spec for spec in parameter_specs(layers[first[k]].graph, plan)}
        for spec in parameter_specs(layer.graph, plan):
            like = next(n for n, name in known.items() if name == spec.name)
            parameters[spec.name] = dataclasses.replace(spec, placements=of_first[like].placements)
    return PackedExperts(
        [ExpertLayer(made[first[k]][0], layer.names, **sizes[k]) for k, layer in enumerate(layers)],
        tuple(parameters.values()),
        mesh.size(NODES),
        plan=made[first[0]][1],
        constants=dict(gm.meta.get("constants", {})),
        timings=timings,
    )


def _plan(gm: GraphModule, mesh: Mesh, options: Options) -> Plan:
    """Every rank has all tokens; it has some of the experts, or a slice of the width, and results are added."""
    given = {spec.name: {"sl": Shard(0)} for spec in signature_of(gm).inputs if spec.kind == "input"}
    options = dataclasses.replace(options, batch_dims=tuple((name, None) for name in given))
    if dispatches(gm):
        how = GATHERED if mesh.size(NODES) > 1 else "auto"
        options = dataclasses.replace(options, expert_axis=NODES, token_dispatcher=how)
        plan = make_plan(gm, mesh, options, train=False)
    else:
        within = make_plan(gm, Mesh.of(**{WITHIN: mesh.size(WITHIN)}), options, train=False)
        plan = _by_width(gm, dataclasses.replace(within, mesh=mesh))
    return dataclasses.replace(plan, inputs=given)


def _by_width(gm: GraphModule, plan: Plan) -> Plan:
    """The plan with the width of an MLP sharded over nodes, as tensor parallelism shards it within one."""
    mesh, names = plan.mesh, names_of_parameters(gm)
    if mesh.size(NODES) == 1:
        return plan
    nodes = {node: names[node.name] for node in placeholders(gm) if node.name in names}
    chosen = plan_tensor_parallel(Analysis(gm, mesh, NODES), nodes, {}, {})
    padded = [name for name, found in chosen.parameters.items() if isinstance(p := found.stored, Shard) and p.units]
    if padded:
        raise ValueError(
            f"serve: the width of an MLP does not divide over {mesh.size(NODES)} nodes, found that of {padded[0]}; use "
            "another number"
        )
    parameters = {name: dict(axes) for name, axes in plan.parameters.items()}
    for name, found in chosen.parameters.items():
        within = plan.parameter(name, WITHIN).stored
        if isinstance(within, Shard) and isinstance(found.stored, Shard) and within.dim == found.stored.dim:
            blocks = tuple(b // mesh.size(WITHIN) for b in found.stored.blocks)
            found = dataclasses.replace(found, stored=Shard(within.dim, blocks), used=Shard(within.dim, blocks))
        parameters[name][NODES] = found
    if not any(isinstance(found.stored, Shard) for found in chosen.parameters.values()):
        why = next(iter(chosen.refused.values()), "nothing contracts it")
        raise ValueError(
            f"serve: the width of an MLP does not divide over {mesh.size(NODES)} nodes: {why}; use another number"
        )
    return dataclasses.replace(plan, parameters=parameters)


def _check_axes(mesh: Mesh) -> None:
    other = next((name for name, size in mesh.axes if size > 1 and name not in (NODES, WITHIN)), None)
    if other is not None:
        raise ValueError(
            f"serve: experts in a role of their own are sharded on ep and tp, found axis {other}={mesh.size(other)} in "
            "their mesh; use ep for it"
        )


def _check_divides(experts: int, nodes: int) -> None:
    if experts % nodes:
        fits = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise ValueError(
            f"serve: {experts} experts do not divide over {nodes} nodes of the role experts; use ep of {fits}"
        )


def _sizes(layer: CutLayer) -> dict[str, Any]:
    """What `ExpertLayer` says of tokens and experts."""
    given = {n.name: n for n in placeholders(layer.graph)[: len(GIVEN)] if n.name in GIVEN}
    x = given["x"].meta["val"]
    of_token = {"hidden": x.shape[1], "dtype": x.dtype}
    if "expert" not in given:
        return {**of_token, "num_experts": 0, "top_k": 0, "weights_dtype": None}
    experts = int(arguments(dispatches(layer.graph)[0])["num_experts"])
    top_k, weights_dtype = shape(given["expert"])[1], given["weights"].meta["val"].dtype
    return {**of_token, "num_experts": experts, "top_k": top_k, "weights_dtype": weights_dtype}


def _compiled(layer: CutLayer, ctx: Compilation, number: int, options: Options, unit: int) -> tuple[StepGraph, Plan]:
    """The graph of one rank for any number of tokens, and its plan."""
    gm = layer.graph
    with ctx.within(f"experts{number}."):
        ctx.observe("cut", gm)
        plan = timed(ctx.timings, "plan", lambda: _plan(gm, ctx.mesh, options))
        samples = samples_of(shape(placeholders(gm)[0])[0], unit)
        with of_requests():
            made = [_local(copy_graph(gm), ctx, plan, s, s is samples[0]) for s in samples]
            graph = symbolic(made, samples)
        _count_tokens(graph)
        ctx.observe("packed", graph)
    return StepGraph(graph, [*plan.inputs, *layer.names], ["y"]), plan


def _local(gm: GraphModule, ctx: Compilation, plan: Plan, part: TokenSlice, watched: bool) -> GraphModule:
    """The graph of one rank for one number of tokens."""
    ctx = ctx.of_slice(part, watched)
    ctx.plan = plan
    gm = PassManager(PLACEMENT_PASSES).run(gm, ctx, facts=("functional",))
    if ctx.mesh.size(NODES) > 1:
        _keep_addend(gm)
    gm = forward_only(gm)
    routed_sizes(gm)
    gm = promise(gm)
    return PassManager(STEP_PASSES).run(gm, ctx, facts=("step",))


def _count_tokens(gm: GraphModule) -> None:
    """Read the number of tokens from x instead of an input."""
    x, *_, last = placeholders(gm)
    known = {node.name: node for node in placeholders(gm)[-2:]}
    if known[LENGTH].users:
        counted = insert_call(last.next, aten.sym_size.int, (x, 0), like=x, val=known[LENGTH].meta["val"])
        known[LENGTH].replace_all_uses_with(counted)
    for node in known.values():
        gm.graph.erase_node(node)
    gm.recompile()


def _keep_addend(gm: GraphModule) -> None:
    """Return a node's addend instead of the sum over nodes, the only thing that they would exchange. Raises ValueError
    for another."""
    (y,) = outputs(gm)
    exchanged = [node for node in gm.graph.nodes if is_conversion(node) and _moves_over_nodes(node)]
    if exchanged != [y]:
        found = describe(exchanged[0] if exchanged else y)
        raise ValueError(
            f"serve: nodes of the role experts add their results, found other exchanges at {found}; use ep=1"
        )
    output_node(gm).args = ((y.args[0],),)
    gm.graph.erase_node(y)


def _moves_over_nodes(node: Node) -> bool:
    axis, src, dst = conversion_of(node)
    return axis == NODES and conversion(src, dst) not in ("none", "slice")

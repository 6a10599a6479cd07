"""Whether a plan fits a graph: names, dims and shards; and whether options fit a mesh."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from torch.fx import GraphModule

from autopar.ac_policies import AC_POLICIES, AUTO
from autopar.adapters.operators import OpOverload
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.cost.topology import Topologies
from autopar.ir.graph import global_shape, placeholders
from autopar.ir.mesh import LEVELLED, Mesh
from autopar.ir.meta import signature_of
from autopar.ir.placement import Placement, Shard, check_shard, local_shape
from autopar.options import DECLARED, EXPERT_AXES, Options
from autopar.plan import ParameterPlan, Plan
from autopar.planner.batch_dims import check_dims_exist
from autopar.planner.experts.expert_plan import check_experts
from autopar.planner.pipeline.slice_lengths import check_lengths, slice_unit, token_count
from autopar.schedule.request import SCHEDULES

WHOLE_WEIGHTS = ("dp_replicate", "dp", "cp")  # shard the batch or its tokens, so weights are used replicated
MAKERS = ("", "forward", "backward")  # what computes the gradients of chunked losses; "": not decided


def check_fits(plan: Plan, gm: GraphModule, train: bool = False) -> None:
    """Check that names are those of a graph's parameters, that dims exist, that blocks sum up and divide, and that a
    step with gradients (``train``) has the token slices that its schedule runs. Raises ValueError.

    Only inputs that the graph has are checked: a plan also serves batches with others.
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
                f"plan: an override of {name!r}, which is neither a parameter nor an input of this model; leave it out"
            )
    check_dims_exist(plan.batch_dims, inputs)
    check_experts(gm, plan.mesh, plan.experts)
    if plan.loss_gradients not in MAKERS:
        raise ValueError(
            f"plan: chunked losses compute gradients in the {plan.loss_gradients!r}; use 'forward' or 'backward'"
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
    """A shard of a weight is used as it is stored, or the weight is gathered; on axes that shard the batch it is always
    gathered. ``of_experts``: the axes that experts are sharded on."""
    for axis, way in axes.items():
        whole = axis in WHOLE_WEIGHTS and axis not in of_experts
        if isinstance(way.used, Shard) and (whole or way.stored != way.used):
            raise ValueError(
                f"plan: parameter {name} is stored as {way.stored} and used as {way.used} on axis {axis!r}; use it as "
                "it is stored, which only tp and ep can, or replicated (R)"
            )


def _check_cuts(plan: Plan, name: str, shape: tuple[int, ...], placements: Mapping[str, Placement]) -> None:
    """Each axis shards the local shape that the axes before it leave. Raises ValueError."""
    mesh, left = plan.mesh.with_microbatches(plan.options.all_microbatches), shape
    for axis, pieces in mesh.cut_order.items():
        p = placements.get(axis)
        if not isinstance(p, Shard):
            continue
        if not 0 <= p.dim < len(shape):
            raise ValueError(
                f"plan: {name} is sharded as {p} on axis {axis!r}, it has shape {tuple(shape)}; use an existing dim"
            )
        try:
            check_shard(left[p.dim], p, pieces)
        except ValueError as error:
            why = str(error).removeprefix("placement: ")
            raise ValueError(
                f"plan: {name} of shape {tuple(shape)} on axis {axis!r}: {why}; shard another dim, or replicate it (I)"
            ) from None
        left = local_shape(left, p, pieces)


# --- options -------------------------------------------------------------------------------------------


def check_names(options: Options) -> None:
    """Names in registries: a misspelled one is an error on any mesh. Raises ValueError."""
    AC_POLICIES[options.ac_policy]
    if options.activation_checkpoint == AUTO and not options.memory_limit:
        raise ValueError(
            "activation_checkpoint: auto keeps the memory of a rank under a limit, found no memory_limit; set one, "
            'such as memory_limit="80GB", or activation_checkpoint="selective" or "full"'
        )
    if options.activation_offload and not options.memory_limit and not options.activation_checkpoint:
        raise ValueError(
            "activation_offload: offloads activations that do not fit a memory_limit, found "
            f'{options.activation_offload:,} bytes and no memory_limit; set one, such as memory_limit="80GB", or '
            'activation_checkpoint="offload"'
        )
    if options.schedule:
        SCHEDULES[options.schedule]
    for name in options.attention.split("+") if options.attention != "auto" else ():
        ALGORITHMS[name]
    Topologies.parse(options.topology)
    for name in options.replicate_ops:
        if not _is_operator(name):
            raise ValueError(f"replicate_ops: no operator {name!r}; use a name such as 'aten.cumsum.default'")


def check_used(options: Options, mesh: Mesh) -> None:
    """Refuse options that have no effect because the mesh lacks their axis. An axis of one rank is enough, so that a
    script runs on meshes of all sizes. Raises ValueError."""
    for name, option in DECLARED.items():
        value, axes = getattr(options, name), option.axes
        if axes and value != option.default and not any(axis in mesh.sizes for axis in axes):
            raise ValueError(
                f"{name}: needs a mesh axis {' or '.join(axes)}, found {name}={value!r} on the mesh {mesh}; "
                f"leave it out, or add such an axis"
            )
    _check_experts(options, mesh)
    if options.reshard_after_forward != DECLARED["reshard_after_forward"].default and not options.shards_parameters:
        raise ValueError(
            f"reshard_after_forward: says when parameters that ZeRO shards are gathered, found "
            f"reshard_after_forward={options.reshard_after_forward!r} with zero=0; leave it out, or set zero=3"
        )
    if options.precision.gather and options.shards_parameters and options.gathers_once:
        raise ValueError(
            f"precision: gather={options.precision.gather!r} rounds parameters for each use, found zero="
            f"{options.zero}, which gathers them once per step; use zero=3, or leave gather out"
        )
    wiring = Topologies.parse(options.topology)
    for name in wiring.axes:
        axis, *level = re.split("[%/]", name)
        if axis not in ("*", "host") and axis not in mesh.sizes:
            raise ValueError(f"topology: names links of the axis {axis!r}, found the mesh {mesh}; leave that axis out")
        if level:
            _check_level(name, axis, level, mesh)
            wiring.per_node(axis)


def _check_experts(options: Options, mesh: Mesh) -> None:
    axis = options.expert_axis
    if axis in EXPERT_AXES[1:] and axis not in mesh.sizes:
        raise ValueError(
            f"expert_axis: expected an axis of the mesh {mesh} to shard experts on, found expert_axis={axis!r}; "
            'add that axis, or an axis "ep" for experts alone'
        )
    if axis in EXPERT_AXES[1:] and mesh.size("ep") > 1:
        raise ValueError(
            f"expert_axis: an axis 'ep' shards experts, found expert_axis={axis!r} beside ep={mesh.size('ep')}; leave "
            f"one of them out (for ep within {axis}, as in Megatron, use axes of {axis}/ep and ep ranks without "
            "expert_axis=)"
        )
    if axis == "ep" and "ep" not in mesh.sizes and options.token_dispatcher != DECLARED["token_dispatcher"].default:
        raise ValueError(
            f"token_dispatcher: needs experts that are sharded on an axis, found "
            f"token_dispatcher={options.token_dispatcher!r} on the mesh {mesh} without an axis ep; leave it out, add "
            'such an axis, or set expert_axis="dp" (or "cp", "tp", "auto")'
        )


def _check_level(name: str, axis: str, level: list[str], mesh: Mesh) -> None:
    size = mesh.size(axis)
    if axis not in LEVELLED or len(level) != 1 or not (level[0].isascii() and level[0].isdigit()):
        raise ValueError(
            f"topology: expected an axis, or nodes of one of {', '.join(LEVELLED)} such as ep%8 (within 8 ranks) and "
            f"ep/8 (between them), found {name!r}"
        )
    if not 0 < int(level[0]) <= size or size % int(level[0]):
        fits = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise ValueError(
            f"topology: {size} ranks of axis {axis!r} do not divide into nodes of {level[0]}; use one of "
            f"{fits} in {name!r}"
        )


def _is_operator(name: str) -> bool:
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, namespace, None), packet, None) if namespace and packet else None
    return isinstance(getattr(found, overload or "default", None), OpOverload)

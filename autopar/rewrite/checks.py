"""Invariants of graphs, each a named check. The pass manager runs them after every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.adapters.operators import mutates
from autopar.ir.conversions import conversion_of, is_conversion, uncast, unrounded
from autopar.ir.expert_layers import axis_of_experts
from autopar.ir.graph import (
    calls_of,
    describe,
    global_shape,
    has_gradient,
    is_call,
    layer_of,
    outputs,
    placeholders,
    placement,
    shape_on,
    values,
)
from autopar.ir.meta import input_specs, names_of_parameters, signature_of
from autopar.ir.placement import INVARIANT, PARTIAL, REPLICATE, Invariant, Placement, Shard, check_shard, conversion
from autopar.ir.storages import shared_outputs
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.step_checks import StepError, check_step
from autopar.rules import RuleError, local_shapes, matches, operand_placements, result_placements, type_of

Check = Callable[[GraphModule, "Compilation"], None]


class PlacementError(Exception):
    """Placements that do not fit, so that a gradient would be wrong. Always a mistake of a pass, never of a user."""


def check_functional(gm: GraphModule, ctx: Compilation) -> None:
    """No in-place operator is left: later steps would drop its effect silently."""
    for node in gm.graph.nodes:
        if mutates(node.target):
            raise PlacementError(f"{describe(node)} writes in place; normalize must make it functional")


def check_placements(gm: GraphModule, ctx: Compilation) -> None:
    """The types: the operands of every op fit its rule, every conversion is in the table, inputs and outputs have the
    placements of the plan.

    With the duality of the conversion table this proves that each parameter's gradient arrives with the
    parameter's own placement.
    """
    check_types(gm, ctx)
    for axis in ctx.mesh.cut_order:
        _check_inputs(gm, axis, ctx)
        _check_outputs(gm, axis)
        _check_new_state(gm, axis, ctx)


def check_types(gm: GraphModule, ctx: Compilation, nodes: Iterable[Node] | None = None) -> None:
    """The operands of every op fit its rule, and every conversion is in the table: `check_placements` without the
    plan's part.

    ``nodes``: only these (default: all, except those that passed before and have not changed since).
    """
    for node in gm.graph.nodes if nodes is None else nodes:
        if node.op != "call_function":
            continue
        facts = _checked_facts(node)
        known = ctx.checked.get(node) if nodes is None else None
        if known is None or len(known) != len(facts) or not all(map(is_, known, facts)):
            for axis in ctx.mesh.cut_order:
                _check_call(node, axis, ctx)
            ctx.checked[node] = facts


def _checked_facts(node: Node) -> list[Any]:
    """Everything that `_check_call` reads of a node; passes replace these objects and never mutate them."""
    found: list[Any] = [node.target, node.args, node.kwargs]
    for x in (node, *node.all_input_nodes):
        get = x.meta.get
        found += [get("val"), get("placements"), get("result_placements"), get("global_shape"), get("has_gradient"),
                  get("conversion"), get("dealt"), get("global_groups"), get("experts")]  # fmt: skip
    return found


def _check_call(node: Node, axis: str, ctx: Compilation) -> None:
    whole = ctx.plan.options.replicate_ops if ctx.plan is not None else ()
    have = result_placements(node, axis)
    try:
        if is_conversion(node) and conversion_of(node)[0] == axis:
            expected = _converted(node, axis, ctx)
        else:
            expected = type_of(node, axis, ctx.mesh, whole)
    except (RuleError, ValueError) as error:
        raise PlacementError(f"axis {axis!r}: {describe(node)}: {error}") from None
    if not all(matches(h, e, has_gradient(node)) for h, e in zip(have, expected, strict=True)):
        shown = ", ".join(map(str, have)), ", ".join(map(str, expected))
        raise PlacementError(f"axis {axis!r}: {describe(node)} is marked {shown[0]}, but its operands imply {shown[1]}")


def _converted(node: Node, axis: str, ctx: Compilation) -> list[Placement]:
    _, src, dst = conversion_of(node)
    operand = operand_placements(node, axis)[0]
    if not matches(operand, src, has_gradient(node)):
        raise RuleError(f"converts from {src}, but its operand is {operand}")
    if has_gradient(node) or not matches(src, dst, gradient=False):
        conversion(src, dst)
    for p in (src, dst):
        if isinstance(p, Shard):
            check_shard(shape_on(node, axis, ctx.mesh)[p.dim], p, ctx.mesh.pieces(axis))
    return [dst]


def _check_inputs(gm: GraphModule, axis: str, ctx: Compilation) -> None:
    if ctx.plan is None:
        return
    specs = input_specs(gm)
    for node in placeholders(gm):
        spec = specs[node.name]
        # the runtime adds the gradients of token slices: for one of them a parameter is Replicate to begin with
        stored = REPLICATE if axis == "sl" else ctx.plan.parameter(spec.name, axis).stored
        if spec.kind == "parameter" and placement(node, axis) != stored:
            raise PlacementError(f"axis {axis!r}: parameter {spec.name} is {placement(node, axis)}, planned otherwise")
        if spec.kind == "parameter" and has_gradient(node) != spec.requires_grad:
            raise PlacementError(f"parameter {spec.name} is {'treated as frozen' if spec.requires_grad else 'frozen'}")
        if axis != "sl" and not isinstance(placement(node, axis), (Invariant, Shard)):
            # its gradient, or the value itself, would never be reduced
            raise PlacementError(
                f"axis {axis!r}: {spec.kind} {spec.name} is stored as {placement(node, axis)}, not I or S"
            )


def _check_outputs(gm: GraphModule, axis: str) -> None:
    """A scalar with a gradient is a loss: it must be Invariant, so that its gradient (1) is too. Losses of token slices
    are addends, which the runtime adds."""
    expected = PARTIAL if axis == "sl" else INVARIANT
    for value in outputs(gm):
        if not isinstance(value, Node) or global_shape(value) or not has_gradient(value):
            continue
        if placement(value, axis) != expected:
            found = placement(value, axis)
            raise PlacementError(f"axis {axis!r}: output {value.name} is {found}, a loss must be {expected}")


def _check_new_state(gm: GraphModule, axis: str, ctx: Compilation) -> None:
    """A new value of a buffer or of a parameter is as that is stored: the runtime copies it into the rank's piece."""
    if ctx.plan is None or axis == "sl":
        return
    for spec, value in zip(signature_of(gm).outputs, outputs(gm), strict=True):
        if spec.kind == "mutation" and isinstance(value, Node):
            have, stored = placement(value, axis), ctx.plan.parameter(spec.name, axis).stored
            if not matches(have, stored, has_gradient(value)):
                raise PlacementError(f"axis {axis!r}: the new value of {spec.name} is {have}, it is stored as {stored}")


def check_planned_shards(gm: GraphModule, ctx: Compilation) -> None:
    """Every weight that the plan shards on tp or by expert is sharded in some use; otherwise it is refused."""
    assert ctx.plan is not None
    names, axes = names_of_parameters(gm), {"tp", "ep", axis_of_experts(ctx.plan.experts)}
    for node in gm.graph.nodes:
        if is_conversion(node) and (source := uncast(node.args[0])).name in names:
            axis, src, dst = conversion_of(node)
            name = names[source.name]
            planned = axis in axes and isinstance(src, Shard) and ctx.plan.parameter(name, axis).used == src
            if planned and src != dst and _only_converted(source):
                user = next(iter(node.users))
                raise ValueError(
                    f"plan: {name} is planned as {src} on axis {axis!r}, but {describe(user)} needs it as {dst}; "
                    f'replicate it with plan.override({{"{name}": {{"{axis}": "I"}}}})'
                )


def _only_converted(x: Node) -> bool:
    """Whether no call takes a value, or a cast of it, as it is placed."""
    return all(is_conversion(user) or (uncast(user) is not user and _only_converted(user)) for user in x.users)


def check_local_shapes(gm: GraphModule, ctx: Compilation) -> None:
    """Every value has the local shape that its global shape and its placements imply."""
    for node in gm.graph.nodes:
        if node.op != "output" and "global_shape" in node.meta:
            have, expected = [tuple(v.shape) for v in values(node)], local_shapes(node, ctx.mesh)
            if have != expected:
                raise PlacementError(f"{describe(node)} has local shape {have}, its placements say {expected}")


def check_owned(gm: GraphModule, ctx: Compilation) -> None:
    """Every gradient that leaves a step graph has contiguous storage of its own: in-place writes (accumulation over
    microbatches, clipping, the optimizer) change nothing else."""
    shared = shared_outputs(gm, gm.meta.get("owned", ()))
    if shared:
        found = ", ".join(describe(outputs(gm)[i]) for i in shared)
        raise PlacementError(f"a step returns gradients that share storage: {found}")


ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def check_plain(gm: GraphModule, ctx: Compilation) -> None:
    """No value has a detach or an alias among its users: pattern matching looks at adjacent operators."""
    for node in calls_of(gm.graph, *ALIASES):
        if any(user.op != "output" for user in node.users):
            raise StepError(f"{describe(node)} stands between a value and its users")


def is_parameter_gather(node: Node) -> bool:
    """Whether it is an all-gather of a placeholder, cast, rounded or as it is, or the next in a chain of such."""
    if not is_call(node, torch.ops.autopar.all_gather.default):
        return False
    source = node.args[0]
    return isinstance(source, Node) and (uncast(unrounded(source)).op == "placeholder" or is_parameter_gather(source))


def gathers_by_layer(gm: GraphModule) -> list[list[Node]]:
    """Gathers in order, grouped by the layer that uses them first."""
    groups: list[list[Node]] = []
    last = None
    for node in calls_of(gm.graph, torch.ops.autopar.all_gather.default):
        if is_parameter_gather(node):
            layer = layer_of(node) or layer_of(next(iter(node.users)))
            if not groups or layer != last:
                groups.append([])
                last = layer
            groups[-1].append(node)
    return groups


CHECKS: dict[str, Check] = {
    "functional": check_functional,
    "placements": check_placements,
    "planned_shards": check_planned_shards,
    "local_shapes": check_local_shapes,
    "owned": check_owned,
    "step": check_step,
    "plain": check_plain,
}

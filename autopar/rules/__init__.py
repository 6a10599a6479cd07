"""Sharding rules as data, the table of them, and how a node of a graph meets its rule.

rule, call, builders        what a rule says, of which call, and how families of rules are built
table                       operator -> rule; an operator without a row is an error that names it
known_rules                 a cache of rules
infer_rule, derived         rules derived for calls that the table does not have, also in files
rule_trials                 the trials from which rules are derived
core                        rules of operators that only differentiation creates
local_types, local_type_rules    types of step graphs: what each rank has of a value
special, picks, views, matrices, space, custom_backward      rules of particular operators
sequence_parallel           one dim along the dataflow
shared_rows                 what every rank would compute alike of an input

Imports ir, attention and plan. Rewrites, costs, the planner and passes import it.
"""

from __future__ import annotations

import operator

from torch.fx import Node

from autopar.ir.graph import described_at, getitem_index, has_gradient, placement, shape_on, tensor_operands, values
from autopar.ir.mesh import Mesh
from autopar.ir.placement import INVARIANT, Invariant, Pieces, Placement, nested_shape
from autopar.rules.builders import opaque
from autopar.rules.call import Call
from autopar.rules.custom_backward import TARGETS, type_of_part
from autopar.rules.derived import DerivedRule, NoRule, text_of
from autopar.rules.known_rules import known_results, known_rule
from autopar.rules.rule import Cat, Cut, Indivisible, Rule, RuleError, apply, matches
from autopar.rules.table import RULES

__all__ = [
    "RULES", "Call", "Cat", "Cut", "Indivisible", "Rule", "RuleError", "apply", "gives_other_results", "has_rule",
    "local_shapes", "matches", "operand_placements", "result_placements", "rule_of", "set_results", "type_of",
]  # fmt: skip


def result_placements(node: Node, axis: str) -> tuple[Placement, ...]:
    """Placements of every result of a node on an axis."""
    several = node.meta.get("result_placements")
    if several is not None:
        found: tuple[Placement, ...] = several.get(axis, (INVARIANT,) * len(values(node)))
        return found
    return (placement(node, axis),) * len(values(node))


def set_results(node: Node, axis: str, placements: list[Placement]) -> None:
    """Record the placements of a node's results."""
    if isinstance(node.meta["val"], (list, tuple)):
        node.meta["result_placements"] = {**node.meta.get("result_placements", {}), axis: tuple(placements)}
    else:
        node.meta["placements"] = {**node.meta.get("placements", {}), axis: placements[0]}


def operand_placements(node: Node, axis: str) -> list[Placement]:
    """Placement of every tensor operand; a getitem has the one of its result."""
    index = getitem_index(node)
    if index is not None:
        return [result_placements(node.args[0], axis)[index]]  # type: ignore[arg-type]
    return [placement(x, axis) for x in tensor_operands(node)]


def _result_shapes(node: Node, axis: str, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    if not isinstance(node.meta["val"], (list, tuple)):
        return (shape_on(node, axis, mesh),)
    shapes = node.meta.get("global_shape") or [tuple(v.shape) for v in values(node)]
    cut: list[tuple[int, ...]] = []
    for i, shape in enumerate(shapes):
        earlier: dict[str, Pieces] = {}
        for name, size in mesh.cut_order.items():
            if name == axis:
                break
            earlier[name] = size
        placements = {name: result_placements(node, name)[i] for name in earlier}
        cut.append(nested_shape(shape, placements, earlier))
    return tuple(cut)


def has_rule(node: Node) -> bool:
    """Whether the table has the op, or a rule of the call was derived."""
    return node.target in RULES or isinstance(node.meta.get("derived"), DerivedRule)


def gives_other_results(node: Node) -> bool:
    """Whether an operator without a rule returned different results for the same operands: then equal operands on all
    ranks do not make its results equal."""
    derived = node.meta.get("derived")
    return isinstance(derived, NoRule) and not derived.repeats


def rule_of(node: Node, axis: str, mesh: Mesh, relaxed: bool = False, whole: tuple[str, ...] = ()) -> Rule:
    """The rule of a call, with factor sizes as the axis sees them.

    ``whole``: ops that the user wants replicated. Raises ValueError for an op without a rule.
    """
    shapes = _result_shapes(node, axis, mesh)

    def shape_of(x: Node) -> tuple[int, ...]:
        index = getitem_index(node)
        if index is not None and x is node.args[0]:
            return _result_shapes(x, axis, mesh)[index]
        return shape_on(x, axis, mesh)

    call = Call(node, shape_of, shapes, axis=axis, relaxed=relaxed, mesh=mesh)
    if str(node.target) in whole:
        return opaque("it is in replicate_ops")(call)
    build = RULES.get(node.target)
    if build is not None:
        return known_rule(build, call)
    derived = node.meta.get("derived")
    if not isinstance(derived, DerivedRule):
        raise ValueError(missing_rule(node, axis))
    return derived.rule(call)


def missing_rule(node: Node, axis: str) -> str:
    """The message for an op that the table does not have."""
    at = ", ".join(f"{x.name}: {p}" for x, p in zip(tensor_operands(node), operand_placements(node, axis), strict=True))
    tried = node.meta.get("derived")
    why = f" (none could be derived: {tried.why})" if isinstance(tried, NoRule) else ""
    why = f" (the derived rule, {text_of(node)}, does not shard it this way)" if isinstance(tried, DerivedRule) else why
    return (
        f"placements: no sharding rule for {described_at(node)}{why} on axis {axis!r}, operands {at}; add one to "
        f"autopar/rules/table.py (docs/adding.md), or replicate the op with replicate_ops=({str(node.target)!r},)"
    )


def type_of(node: Node, axis: str, mesh: Mesh, whole: tuple[str, ...] = ()) -> list[Placement]:
    """Result placements that the operands' placements imply. Raises RuleError where they do not fit."""
    operands = operand_placements(node, axis)
    gradients = [has_gradient(x) for x in tensor_operands(node)]
    if not has_rule(node) and all(isinstance(p, Invariant) for p in operands):
        return [INVARIANT for _ in values(node)]  # any op may run on replicated values
    if node.target is operator.getitem:
        return operands
    if node.target in TARGETS:
        return type_of_part(node, axis, operands)
    return known_results(rule_of(node, axis, mesh, whole=whole), operands, gradients, mesh.pieces(axis))


def local_shapes(node: Node, mesh: Mesh) -> list[tuple[int, ...]]:
    """Local shapes of a node's results, from their global shapes and placements."""
    shapes = node.meta["global_shape"]
    shapes = shapes if isinstance(node.meta["val"], (list, tuple)) else [shapes]
    axes = {axis: result_placements(node, axis) for axis in mesh.cut_order}
    return [nested_shape(shape, {a: axes[a][i] for a in axes}, mesh.cut_order) for i, shape in enumerate(shapes)]

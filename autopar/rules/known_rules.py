"""A cache of rules: calls that look the same to a builder share one rule, and the placements it implies are cached too.

A builder reads a call's operator and arguments, the shapes as an axis sees them, dtypes, which operands carry a
gradient, and three annotations of passes. All of that is the key; a call with unhashable arguments is not cached.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from autopar.adapters.keys import told_apart
from autopar.ir.graph import frozen, has_gradient
from autopar.ir.placement import Pieces, Placement
from autopar.rules.call import Call, RuleFunction
from autopar.rules.rule import Rule, apply

_MOST = 20_000
_rules: dict[Hashable, Rule] = {}
_applied: dict[Hashable, tuple[Rule, tuple[Placement, ...]]] = {}


def known_rule(build: RuleFunction, call: Call) -> Rule:
    """The rule that the builder returns for the call; do not modify it."""
    try:
        key = build, _key(call)
        rule = _rules.get(key)
    except TypeError:  # not hashable
        return build(call)
    if rule is None:
        _make_room(_rules)
        rule = _rules[key] = build(call)
    return rule


def known_results(
    rule: Rule, operands: Sequence[Placement], gradients: Sequence[bool], ranks: Pieces
) -> list[Placement]:
    """`autopar.rules.rule.apply`."""
    key = id(rule), tuple(operands), tuple(gradients), ranks
    known = _applied.get(key)
    if known is None:
        _make_room(_applied)
        known = _applied[key] = (
            rule,
            tuple(apply(rule, operands, gradients, ranks)),
        )  # keep the rule alive, so that its id stays unique
    return list(known[1])


def _make_room(memo: dict[Any, Any]) -> None:
    if len(memo) >= _MOST:
        memo.clear()


def _key(call: Call) -> Hashable:
    node = call.node
    places: dict[Node, int] = {}

    def leaf(x: Any) -> Hashable:  # numbers for nodes
        return (Node, places.setdefault(x, len(places))) if isinstance(x, Node) else told_apart(x)

    args = frozen(node.args, leaf), frozen(node.kwargs, leaf)
    operands = tuple((call.shape_of(x), _dtypes(x), has_gradient(x)) for x in places)
    marks = (
        node.meta.get("conversion"),
        node.meta.get("dealt"),
        node.meta.get("global_groups"),
        node.meta.get("experts"),
        call.seen,
    )
    return node.target, args, operands, call.result_shapes, _dtypes(node), call.axis, call.relaxed, marks


def _dtypes(node: Node) -> Hashable:
    value = node.meta["val"]
    return value.dtype if isinstance(value, Tensor) else tuple(getattr(x, "dtype", None) for x in value)

"""simplify_arithmetic: undo what differentiation spells out at length.

Consumes    a step graph.
Guarantees  the derivative of silu is one operator again; no power of one, product or quotient with one, integer sum
            with zero, or transpose of a transpose feeds another op; a quotient is taken before an expansion.
Leaves      outputs; every number but silu's derivative, which is rounded once instead of five times.

    s = sigmoid(x); a = sub(1, s); b = mul(x, a); c = add(b, 1); d = mul(s, c); dx = mul(dy, d)
        -->
    dx = silu_backward(dy, x)

    a = expand(m, [2, 512, 384]); b = div(a, 384)      -->     a = div(m, 384); b = expand(a, [2, 512, 384])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import insert_call, is_call, remove_dead_code
from autopar.rewrite.compilation import Compilation

aten = torch.ops.aten

MULTIPLIED = (aten.mul.Tensor, aten.mul.Scalar)
DIVIDED = (aten.div.Tensor, aten.div.Scalar)
ADDED = (aten.add.Tensor, aten.add.Scalar)


@dataclass(frozen=True)
class SimplifyArithmetic:
    """Applies `RULES` to every node, once."""

    name: ClassVar[str] = "simplify_arithmetic"
    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ()

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        for node in list(gm.graph.nodes):
            for rule in RULES:
                new = rule(gm, node)
                if new is not None:
                    node.replace_all_uses_with(new)
                    break
        remove_dead_code(gm)
        gm.recompile()
        return gm


def _neutral(gm: GraphModule, node: Node) -> Node | None:
    """pow(x, 1), mul(x, 1), div(x, 1), and x + 0 of integers (a float's -0 would change) -> x"""
    if not is_call(node, aten.pow.Tensor_Scalar, *MULTIPLIED, *DIVIDED, *ADDED) or _is_output(node):
        return None
    x, other = node.args
    if not isinstance(x, Node) or isinstance(other, Node):
        return None
    value, result = x.meta["val"], node.meta["val"]
    neutral = 0 if is_call(node, *ADDED) and not value.is_floating_point() else 1
    if is_call(node, *ADDED) and neutral:
        return None
    return x if other == neutral and value.dtype == result.dtype else None


def _double_transpose(gm: GraphModule, node: Node) -> Node | None:
    """t(t(x)) -> x"""
    inner = node.args[0] if is_call(node, aten.t.default) else None
    if not isinstance(inner, Node) or not is_call(inner, aten.t.default) or _is_output(node):
        return None
    x = inner.args[0]
    return x if isinstance(x, Node) else None


def _quotient_of_expanded(gm: GraphModule, node: Node) -> Node | None:
    """div(expand(m), n) -> expand(div(m, n))"""
    if not is_call(node, *DIVIDED):
        return None
    expanded, divisor = node.args[:2]
    if isinstance(divisor, Node) or not is_call(expanded, aten.expand.default) or _is_output(node):  # type: ignore[arg-type]
        return None
    assert isinstance(expanded, Node)
    small, sizes = expanded.args[:2]
    assert isinstance(small, Node)
    if small.meta["val"].dtype != node.meta["val"].dtype or len(expanded.users) > 1:
        return None
    quotient = insert_call(node, node.target, (small, divisor), val=small.meta["val"])  # type: ignore[arg-type]
    return insert_call(node, aten.expand.default, (quotient, sizes), val=expanded.meta["val"])


def _silu_backward(gm: GraphModule, node: Node) -> Node | None:
    """mul(dy, mul(s, add(mul(x, sub(1, s)), 1))) with s = sigmoid(x) -> silu_backward(dy, x)"""
    gradient, factor = _operands(node, aten.mul.Tensor)
    sigmoid, bracket = _operands(factor, aten.mul.Tensor)
    product, one = _operands(bracket, aten.add.Scalar)
    x, rest = _operands(product, aten.mul.Tensor)
    ones, same = _operands(rest, aten.sub.Tensor)
    _, value = _operands(ones, aten.fill.Scalar)
    if one != 1 or value != 1 or same is not sigmoid or _operands(sigmoid, aten.sigmoid.default) != (x,):
        return None
    return insert_call(node, aten.silu_backward.default, (gradient, x), val=node.meta["val"])


def _operands(node: Any, target: Any) -> tuple[Any, ...]:
    """The arguments of a call of ``target``; two Nones where it is another node."""
    return tuple(node.args) if isinstance(node, Node) and is_call(node, target) else (None, None)


def _is_output(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)


RULES: tuple[Callable[[GraphModule, Node], Node | None], ...] = (
    _neutral,
    _double_transpose,
    _quotient_of_expanded,
    _silu_backward,
)

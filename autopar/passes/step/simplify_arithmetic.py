"""simplify_arithmetic: undo what differentiation spells out at length.

Consumes    a step graph.
Guarantees  no power of one, product or quotient with one, integer sum with zero, or transpose of a transpose feeds
            another op; a quotient is taken before an expansion, where only elementwise operators read it: a kernel may
            take for granted that its operand is dense, as it was when the graph was traced.
Leaves      outputs; every number.

    a = expand(m, [2, 512, 384]); b = div(a, 384)      -->     a = div(m, 384); b = expand(a, [2, 512, 384])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from autopar.adapters.operators import OpOverload
from autopar.ir.graph import insert_call, is_call, remove_dead_code
from autopar.ops.traits import is_elementwise
from autopar.rewrite.compilation import Compilation

aten = torch.ops.aten

MULTIPLIED = (aten.mul.Tensor, aten.mul.Scalar)
DIVIDED = (aten.div.Tensor, aten.div.Scalar)
ADDED = (aten.add.Tensor, aten.add.Scalar)


@dataclass(frozen=True)
class SimplifyArithmetic:
    """Applies `RULES` to every node, once."""

    name: ClassVar[str] = "simplify_arithmetic"
    requires: ClassVar[tuple[str, ...]] = ("step", "plain")
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
    same = value.dtype == result.dtype and value.stride() == result.stride()
    return x if other == neutral and same else None


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
    if not all(isinstance(user.target, OpOverload) and is_elementwise(user.target) for user in node.users):
        return None
    assert isinstance(expanded, Node)
    small, sizes = expanded.args[:2]
    assert isinstance(small, Node)
    if small.meta["val"].dtype != node.meta["val"].dtype or len(expanded.users) > 1:
        return None
    quotient = insert_call(node, node.target, (small, divisor), val=small.meta["val"])  # type: ignore[arg-type]
    return insert_call(node, aten.expand.default, (quotient, sizes), val=expanded.meta["val"])


def _is_output(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)


RULES: tuple[Callable[[GraphModule, Node], Node | None], ...] = (
    _neutral,
    _double_transpose,
    _quotient_of_expanded,
)

"""simplify: peephole rewrites of what tracing and differentiation leave behind.

Consumes    a step graph.
Guarantees  no view that changes nothing (same shape, detach, alias), power of one, product or quotient with one,
            integer sum with zero, or transpose of a transpose feeds another op; a view of a view of a contiguous value
            is one view. A division moves before an expansion that only elementwise operators read, since a kernel may
            rely on a dense operand, as it was traced. An all-reduce over dp that only feeds an all-reduce over
            dp_replicate becomes one over both: for n and r ranks it moves 2 (nr - 1)/nr of the value instead of
            2 (n - 1)/n + 2 (r - 1)/r.
Leaves      outputs; every number; all-reduces of shards over dp_replicate, after a reduce-scatter; all-reduces over
            axes with different links.

    a = view(w, [32]); b = detach(a); y = mul(b, x)            -->     y = mul(w, x)
    a = view(x, [64, 32]); b = view(a, [4, 16, 32])            -->     b = view(x, [4, 16, 32])
    a = expand(m, [2, 512, 384]); b = div(a, 384)              -->     a = div(m, 384); b = expand(a, [2, 512, 384])
    a = all_reduce(x, "dp"); b = all_reduce(a, "dp_replicate")           -->     b = all_reduce(x, "dp_replicate,dp")
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from autopar.adapters.operators import OpOverload
from autopar.ir.graph import arguments, insert_call, is_call, remove_dead_code, set_argument
from autopar.ir.mesh import DATA
from autopar.ops.traits import PASSING, is_elementwise, is_view
from autopar.rewrite.checks import ALIASES
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass

aten = torch.ops.aten

MULTIPLIED = (aten.mul.Tensor, aten.mul.Scalar)
DIVIDED = (aten.div.Tensor, aten.div.Scalar)
ADDED = (aten.add.Tensor, aten.add.Scalar)


class Simplify(Pass):
    """Views first, then arithmetic by `RULES`, then all-reduces."""

    name = "simplify"
    requires = ("step",)
    ensures = ("plain",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        for node in list(gm.graph.nodes):
            _simplify_view(node)
        remove_dead_code(gm)
        for node in list(gm.graph.nodes):
            new = next((new for rule in RULES if (new := rule(node)) is not None), None)
            if new is not None:
                node.replace_all_uses_with(new)
        remove_dead_code(gm)
        for node in list(gm.graph.nodes):
            _merge_all_reduces(node, list(ctx.mesh.sizes))
        gm.recompile()
        return gm


def _simplify_view(node: Node) -> None:
    if _changes_nothing(node):  # every user but the output, whose storage must not be shared
        operand = node.args[0]
        assert isinstance(operand, Node)
        node.replace_all_uses_with(operand, delete_user_cb=lambda user: user.op != "output")
    elif is_call(node, aten.view.default):
        inner = node.args[0]
        viewed = isinstance(inner, Node) and is_call(inner, aten.view.default, aten._unsafe_view.default)
        base = inner.args[0] if viewed else None  # type: ignore[union-attr]
        if isinstance(base, Node) and base.meta["val"].is_contiguous():
            node.update_arg(0, base)


def _changes_nothing(node: Node) -> bool:
    if is_call(node, *ALIASES):
        return True
    if node.target not in PASSING or not is_view(node.target):
        return False
    source, result = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return bool(source.shape == result.shape and source.stride() == result.stride())


def _neutral(node: Node) -> Node | None:
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


def _double_transpose(node: Node) -> Node | None:
    """t(t(x)) -> x"""
    inner = node.args[0] if is_call(node, aten.t.default) else None
    if not isinstance(inner, Node) or not is_call(inner, aten.t.default) or _is_output(node):
        return None
    x = inner.args[0]
    return x if isinstance(x, Node) else None


def _quotient_of_expanded(node: Node) -> Node | None:
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


RULES: tuple[Callable[[Node], Node | None], ...] = (_neutral, _double_transpose, _quotient_of_expanded)


def _merge_all_reduces(node: Node, order: list[str]) -> None:
    """An all-reduce over one data axis whose only user is the all-reduce over the other is merged into it."""
    inner = arguments(node)["x"] if _sums_data(node) else None
    if isinstance(inner, Node) and _sums_data(inner) and list(inner.users) == [node]:
        axes = {arguments(node)["axis"], arguments(inner)["axis"]}
        if len(axes) == 2:
            set_argument(node, "axis", ",".join(sorted(axes, key=order.index)))
            set_argument(node, "x", arguments(inner)["x"])
            node.graph.erase_node(inner)


def _sums_data(node: Node) -> bool:
    if not is_call(node, torch.ops.autopar.all_reduce.default):
        return False
    given = arguments(node)
    return given["axis"] in DATA and given["op"] == "sum"

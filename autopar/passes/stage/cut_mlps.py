"""cut_mlps: as `cut_experts`, for the MLPs of a dense model, which all tokens go to.

Consumes    a normalized global graph of a forward that nobody differentiates.
Guarantees  each MLP, from its first products to its last one, is one `autopar::ask_experts` of its input alone, and a
            graph of its own. An MLP is found by dataflow: a product whose operand is made elementwise of products of
            one value, which has the width of its result. Slices of the width in between add up to the whole.
Leaves      the bias of the last product, which is added once.

    y = linear(mul(silu(linear(x, w1)), linear(x, w3)), w2, b)        -->    y = add(ask_experts(x, None, None, 0), b)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from autopar.adapters.operators import OpOverload
from autopar.ir.expert_layers import dispatches
from autopar.ir.graph import arguments, calls_of, insert_call, is_call, placeholders, reach, remove_dead_code, shape
from autopar.ir.meta import input_specs
from autopar.ops.traits import PASSING, is_elementwise
from autopar.passes.stage.cut_layers import FIXED, WAY_OUT, CutLayer, extracted_part, take_out

aten, ours = torch.ops.aten, torch.ops.autopar
_LINEAR = aten.linear.default
_PARTS = (aten.split_with_sizes.default, operator.getitem)


@dataclass(frozen=True)
class _Mlp:
    """x -> first products, and what is made of them: ``inner`` -> the last product."""

    x: Node
    inner: frozenset[Node]
    last: Node


def cut_mlps(gm: GraphModule) -> list[CutLayer]:
    """Cut all MLPs out of a graph, in place; the k-th answers ``ask_experts(..., k)``. Raises ValueError for a model
    without one, and for one with experts."""
    if dispatches(gm):
        raise ValueError(
            'serve: apart="mlp" is for dense models, found experts, which would stay with attention; use '
            'apart="experts"'
        )
    found = mlps_of(gm)
    if not found:
        raise ValueError(
            'serve: apart="mlp" needs MLPs, products of one value with elementwise operators up to a product that '
            f"returns its width, found none; {WAY_OUT}"
        )
    cut = [_cut(gm, mlp, k) for k, mlp in enumerate(found)]
    take_out(gm, {name for layer in cut for name in layer.names})
    return cut


def mlps_of(gm: GraphModule) -> list[_Mlp]:
    """The MLPs of a graph, in the order of their last products."""
    specs = input_specs(gm)
    given = (n for n in placeholders(gm) if specs[n.name].kind not in FIXED)
    live = set(reach(given, lambda node: node.users))
    found = (_mlp_before(node, live) for node in calls_of(gm.graph, _LINEAR))
    return [mlp for mlp in found if mlp is not None]


def _mlp_before(last: Node, live: set[Node]) -> _Mlp | None:
    """The MLP that a product ends, if it does."""
    inner, sources, waiting = set[Node](), set[Node](), [last.args[0]]
    while waiting:
        node = waiting.pop()
        assert isinstance(node, Node)
        if node in inner or node not in live:
            continue
        inner.add(node)
        if _is_product(node, live):
            sources.add(node.args[0])  # type: ignore[arg-type]
        elif _is_inner(node):
            waiting += node.all_input_nodes
        else:
            return None
    if len(sources) != 1 or not _is_product(last, live) or not any(map(_is_activation, inner)):
        return None
    (x,) = sources
    leaves = any(user not in inner and user is not last for node in inner for user in node.users)
    return None if leaves or shape(x) != shape(last) else _Mlp(x, frozenset(inner), last)


def _is_product(node: Node, live: set[Node]) -> bool:
    """Whether it multiplies a value by parameters."""
    return is_call(node, _LINEAR) and node.args[0] in live and arguments(node)["weight"] not in live


def _is_inner(node: Node) -> bool:
    return node.op == "call_function" and (
        node.target in _PARTS
        or node.target in PASSING
        or (isinstance(node.target, OpOverload) and is_elementwise(node.target))
    )


def _is_activation(node: Node) -> bool:
    return _is_inner(node) and node.target not in _PARTS and node.target not in PASSING


def _cut(gm: GraphModule, mlp: _Mlp, number: int) -> CutLayer:
    bias, after = arguments(mlp.last)["bias"], mlp.last.next
    wide, flat = list(shape(mlp.x)), [-1, shape(mlp.x)[-1]]
    flat[0] = mlp.x.meta["val"].numel() // flat[1]
    x = insert_call(mlp.x.next, aten.reshape.default, (mlp.x, flat), like=mlp.last)
    inside = insert_call(x.next, aten.reshape.default, (x, wide), like=mlp.last)
    for node in mlp.inner:
        node.replace_input_with(mlp.x, inside)
    product = insert_call(after, _LINEAR, mlp.last.args[:2], like=mlp.last)
    result = insert_call(after, aten.reshape.default, (product, flat), like=mlp.last)
    layer = extracted_part(gm, {*mlp.inner, inside, product, result}, {"x": x}, result, without=mlp.last)
    asked = insert_call(after, ours.ask_experts.default, (x, None, None, number), like=mlp.last)
    y = insert_call(after, aten.reshape.default, (asked, wide), like=mlp.last)
    if bias is not None:
        y = insert_call(after, aten.add.Tensor, (y, bias), like=mlp.last)
    mlp.last.replace_all_uses_with(y)
    remove_dead_code(gm)
    return layer

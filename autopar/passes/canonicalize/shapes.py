"""One canonical form for what only moves or renames data: reshape, split, and nothing at all for no-ops."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.ir.graph import arguments, set_argument
from autopar.rewrite.build import Build, Rewrite, calls, operand, shape_of, value_of

aten = torch.ops.aten


def reshape(node: Node, build: Build) -> Node | None:
    """view(x, [2, -1]), flatten, unflatten, squeeze() --> reshape(x, [2, 8]); reshape(reshape(x)) --> one.

    reshape, not view: strides change when a graph is sharded.
    """
    x, shape = operand(node), shape_of(node)
    spelled = calls(node, aten.reshape.default) and list(node.args[1]) == list(shape)  # type: ignore[arg-type]
    if spelled and shape != shape_of(x) and not calls(x, aten.reshape.default):
        return None
    return build.reshape(x, shape)


def same(node: Node, build: Build) -> Node | None:
    """clone(x), alias(x), contiguous(x), lift_fresh_copy(x) --> x   (the graph has no in-place operators)"""
    return operand(node)


def to_copy(node: Node, build: Build) -> Node | None:
    """_to_copy(x, dtype=x.dtype) --> x; arguments other than the dtype are dropped."""
    x = operand(node)
    if value_of(x).dtype == value_of(node).dtype:
        return x
    if set(node.kwargs) == {"dtype"} and calls(node, aten._to_copy.default):
        return None
    return build.cast(x, value_of(node).dtype)


def expand(node: Node, build: Build) -> Node | None:
    """expand(x, x.shape) --> x; expand(x, [-1, 4]) --> expand(x, [2, 4])"""
    x, shape = operand(node), shape_of(node)
    if shape_of(x) == shape:
        return x
    if list(shape) == list(node.args[1]):  # type: ignore[arg-type]
        return None
    return build(aten.expand.default, x, list(shape))


def broadcast_tensors(node: Node, build: Build) -> Node | None:
    """a, b = broadcast_tensors([x, y]) --> a, b = x, expand(y, x.shape)   (part of mse_loss, l1_loss ...)"""
    shape = tuple(node.meta["val"][0].shape)
    for piece in list(node.users):
        x = node.args[0][piece.args[1]]  # type: ignore[index]
        assert isinstance(x, Node), f"normalize: an operand of {node.name} is {x!r}"
        piece.replace_all_uses_with(x if shape_of(x) == shape else build(aten.expand.default, x, list(shape)))
        build.at.graph.erase_node(piece)
    return None


def whole_slice(node: Node, build: Build) -> Node | None:
    """slice(x, 1, 0, 9223372036854775807) --> x"""
    return operand(node) if shape_of(operand(node)) == shape_of(node) else None


def copy(node: Node, build: Build) -> Node | None:
    """copy(destination, source) --> source, cast and expanded   (what an in-place copy_ became)"""
    known = arguments(node)
    source = build.cast(known["src"], value_of(node).dtype)
    return source if shape_of(source) == shape_of(node) else build(aten.expand.default, source, list(shape_of(node)))


def fill(node: Node, build: Build) -> Node | None:
    """fill(x, 3) --> full(x.shape, 3); fill(x, tensor) --> expand(tensor, x.shape)"""
    value, shape, dtype = node.args[1], list(shape_of(node)), value_of(node).dtype
    if isinstance(value, Node):
        filled = build.cast(value, dtype)
        return build(aten.expand.default, filled, shape) if shape else filled
    return build(aten.full.default, shape, value, dtype=dtype, device=value_of(node).device)


def joined_again(node: Node, build: Build) -> Node | None:
    """cat(split(x, 4, 1), 1) --> x; cat(unbind(x, 1), 1) --> reshape(x); stack(unbind(x, 1), 1) --> x"""
    known = arguments(node)
    parts = known["tensors"]
    if not parts or not all(calls(p, operator.getitem) and operand(p) is operand(parts[0]) for p in parts):
        return None
    made = operand(parts[0])
    if not calls(made, aten.split_with_sizes.default, aten.unbind.int):
        return None
    x, taken, dim = operand(made), arguments(made)["dim"], known["dim"] % len(shape_of(node))
    if [p.args[1] for p in parts] != [*range(len(made.meta["val"]))] or taken % len(shape_of(x)) != dim:
        return None
    if calls(made, aten.split_with_sizes.default):
        return x if calls(node, aten.cat.default) else None
    return build.reshape(x, shape_of(node))


def masked_scatter(node: Node, build: Build) -> None:
    """masked_scatter(x, expand(mask, [4, 8, 32]), y) --> masked_scatter(x, mask, y): whole rows are written; an x that
    broadcasts to the mask is expanded"""
    mask, x = arguments(node)["mask"], arguments(node)["self"]
    if shape_of(x) != shape_of(node):
        set_argument(node, "self", build(aten.expand.default, x, shape_of(node)))
    if calls(mask, aten.expand.default):
        set_argument(node, "mask", operand(mask))


def split(node: Node, build: Build) -> Node | None:
    """split(x, 16, -1), chunk(x, 2, -1), tensor_split --> split_with_sizes(x, [16, 16], 2)"""
    known = arguments(node)
    x = operand(node)
    dim = known["dim"] % len(shape_of(x))
    sizes = [v.shape[dim] for v in node.meta["val"]]
    if calls(node, aten.split_with_sizes.default) and known["dim"] == dim:
        return None
    return build(aten.split_with_sizes.default, x, sizes, dim)


def type_as(node: Node, build: Build) -> Node | None:
    """type_as(x, y) --> _to_copy(x, dtype=y.dtype)"""
    return build.cast(operand(node), value_of(node).dtype)


def twice_transposed(node: Node, build: Build) -> Node | None:
    """t(t(w)) --> w"""
    return operand(operand(node)) if calls(operand(node), aten.t.default) else None


_UNARY = [aten.relu, aten.gelu, aten.silu, aten.tanh, aten.sigmoid, aten.neg, aten.abs, aten.exp, aten.sqrt, aten.rsqrt]


def unary_before_reshape(node: Node, build: Build) -> Node | None:
    """gelu(reshape(x, [B*S, H])) --> reshape(gelu(x), [B*S, H])   so that flattening ends up next to its inverse"""
    flat = operand(node)
    if not calls(flat, aten.reshape.default) or len(shape_of(operand(flat))) <= len(shape_of(flat)):
        return None
    inner = build(node.target, operand(flat), *node.args[1:], **node.kwargs)  # type: ignore[arg-type]
    return build.reshape(inner, shape_of(node))


TABLE: dict[Any, Rewrite] = {
    **dict.fromkeys(
        (aten.view.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int,
         aten.reshape.default, aten._reshape_alias.default, aten.squeeze.default, aten.view_as.default,
         aten.reshape_as.default),
        reshape,
    ),
    **dict.fromkeys(
        (aten.clone.default, aten.alias.default, aten.contiguous.default, aten.lift_fresh_copy.default,
         aten.lift_fresh.default, aten.lift.default, aten.positive.default),
        same,
    ),
    **dict.fromkeys((aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout), to_copy),
    aten.expand.default: expand,
    aten.broadcast_tensors.default: broadcast_tensors,
    aten.slice.Tensor: whole_slice,
    aten.copy.default: copy,
    aten.fill.Scalar: fill,
    aten.fill.Tensor: fill,
    **dict.fromkeys(
        (aten.split.Tensor, aten.chunk.default, aten.split_with_sizes.default, aten.tensor_split.sections,
         aten.tensor_split.indices, aten.split.sizes),
        split,
    ),
    aten.cat.default: joined_again,
    aten.stack.default: joined_again,
    aten.masked_scatter.default: masked_scatter,
    aten.type_as.default: type_as,
    aten.t.default: twice_transposed,
    **{packet.default: unary_before_reshape for packet in _UNARY},
}  # fmt: skip


def slices_to_split(graph: Graph) -> None:
    """a = slice(x, 2, 0, 4); b = slice(x, 2, 4, 8) --> a, b = split_with_sizes(x, [4, 4], 2)

    for slices of one value along one dim that cover it without overlap: each can then be sharded by itself.
    """
    for x in list(graph.nodes):
        by_dim: dict[int, list[Node]] = {}
        for user in x.users:
            if calls(user, aten.slice.Tensor) and user.args[0] is x and arguments(user)["step"] == 1:
                by_dim.setdefault(arguments(user)["dim"] % len(shape_of(x)), []).append(user)
        for dim, slices in by_dim.items():
            _split(graph, x, dim, slices)


def _split(graph: Graph, x: Node, dim: int, slices: list[Node]) -> None:
    size = shape_of(x)[dim]
    spans: dict[tuple[int, int], list[Node]] = {}
    for node in slices:
        start = arguments(node)["start"] or 0
        start = max(0, start + size if start < 0 else start)
        spans.setdefault((start, start + shape_of(node)[dim]), []).append(node)
    bounds = sorted(spans)
    tiles = [0, *(stop for _, stop in bounds)] == [*(start for start, _ in bounds), size]
    if len(bounds) < 2 or not tiles:
        return
    at = x.next
    while at.op == "placeholder":
        at = at.next
    build = Build(at, like=slices[0])
    pieces = build(aten.split_with_sizes.default, x, [stop - start for start, stop in bounds], dim)
    named = [build(operator.getitem, pieces, i) for i in range(len(bounds))]
    for span, piece in zip(bounds, named):
        for node in spans[span]:
            node.replace_all_uses_with(piece)
            graph.erase_node(node)

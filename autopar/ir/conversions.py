"""The conversion: the one node through which a value changes its placement on an axis.

There are two levels. `convert` is in global graphs, where it is the identity. `exchange` is in local graphs: it runs
the conversion with raw collectives, and its gradient goes through the transposed conversion. Over token slices, an axis
in time, `exchange_slice` takes its place until `slice_tokens` removes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from autopar.ir.graph import is_call
from autopar.ir.placement import Placement, Shard, conversion, parse_placement, rows_of_slice, transpose
from autopar.ops import collectives  # noqa: F401  (registers the raw collectives)


def convert(x: torch.Tensor, axis: str, src: str, dst: str) -> torch.Tensor:
    """Value ``x`` goes from placement ``src`` to ``dst`` on a mesh axis.

    On global shapes it is the identity (the global value does not change), so that a graph with placements still runs
    in one process. `lower_to_local` turns it into an `exchange`.
    """
    return x


def exchange(x: torch.Tensor, axis: str, size: int, src: str, dst: str) -> torch.Tensor:
    """The conversion of local values, over ``size`` ranks. Differentiable: the gradient takes the transpose."""
    out: torch.Tensor = _ExchangeCall.apply(x, axis, size, parse_placement(src), parse_placement(dst))
    return out


def exchange_slice(x: torch.Tensor, length: int, start: int, total: int, src: str, dst: str) -> torch.Tensor:
    """The conversion as one slice of the tokens sees it: tokens [start, start + length) of ``total``.

    A replicated value is narrowed to the slice's rows. What needs other slices has a shape only: a cache replaces it.
    """
    before, after = parse_placement(src), parse_placement(dst)
    if isinstance(after, Shard) and not isinstance(before, Shard):
        rows = rows_of_slice(x.shape[after.dim], after, length, start, total)
        parts = [x.narrow(after.dim, first, count) for first, count in rows]
        return torch.cat(parts, after.dim) if len(parts) > 1 else parts[0]
    shape = list(x.shape)
    if isinstance(before, Shard):
        shape[before.dim] = shape[before.dim] * total // length
    return x.new_empty(shape)


def is_conversion(node: Node) -> bool:
    """Whether a node is a conversion, of either level."""
    return node.op == "call_function" and node.target in (convert, exchange, exchange_slice)


def is_zeros(x: Any) -> bool:
    """Whether a value is created as zeros."""
    while isinstance(x, Node) and is_conversion(x):
        x = x.args[0]
    if not isinstance(x, Node):
        return False
    aten = torch.ops.aten
    return is_call(x, aten.zeros.default) or bool(is_call(x, aten.full.default) and x.args[1] == 0)


def is_cast_input(node: Node) -> bool:
    """Whether a node casts an input of its graph to a narrower dtype, and is its only user: this is how a parameter is
    used that is stored in another dtype."""
    if not is_call(node, torch.ops.aten._to_copy.default):
        return False
    source: Node = node.args[0]  # type: ignore[assignment]
    return source.op == "placeholder" and all(is_narrower(user, source) for user in source.users)


def is_narrower(node: Node, source: Node) -> bool:
    """Whether a node is ``source`` in a narrower floating dtype."""
    if not is_call(node, torch.ops.aten._to_copy.default) or node.args[0] is not source:
        return False
    new, old = node.meta["val"].dtype, source.meta["val"].dtype
    return new.is_floating_point and old.is_floating_point and new.itemsize < old.itemsize


def uncast(node: Node) -> Node:
    """The input that a node casts, else the node."""
    return node.args[0] if is_cast_input(node) else node  # type: ignore[return-value]


def unrounded(node: Node) -> Node:
    """The value that a node rounds to eight bits (`autopar.ops.few_bits.scaled_products`), else the node."""
    return node.args[0] if is_call(node, torch.ops.autopar.quantized.default) else node  # type: ignore[return-value]


def conversion_of(node: Node) -> tuple[str, Placement, Placement]:
    """(axis, source, target) of a conversion, the placements in terms of global shapes."""
    if "conversion" in node.meta:
        found: tuple[str, Placement, Placement] = node.meta["conversion"]
        return found
    _, axis, src, dst = node.args
    return str(axis), parse_placement(str(src)), parse_placement(str(dst))


class _ExchangeCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: str, size: int, src: Placement, dst: Placement) -> torch.Tensor:
        ctx.facts = axis, size, src, dst
        return run_conversion(x, axis, size, src, dst)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        axis, size, src, dst = ctx.facts
        return run_conversion(grad, axis, size, *transpose(src, dst)), None, None, None, None


def run_conversion(x: torch.Tensor, axis: str, size: int, src: Placement, dst: Placement) -> torch.Tensor:
    """One row of the conversion table as raw collectives."""
    ops = torch.ops.autopar
    kind = conversion(src, dst)
    if kind == "none":
        return x
    if kind == "divide":
        return x / size
    if kind == "all_reduce":
        return ops.all_reduce(x, axis, "sum")
    if kind == "all_to_all":
        assert isinstance(src, Shard) and isinstance(dst, Shard)
        units = (src.units, dst.units) if src.units or dst.units else ()
        return ops.all_to_all(x, src.dim, list(src.blocks), dst.dim, list(dst.blocks), axis, size, *units)
    piece = src if kind in ("all_gather", "pad") else dst
    assert isinstance(piece, Shard)
    op = {
        "all_gather": ops.all_gather,
        "reduce_scatter": ops.reduce_scatter,
        "slice": ops.shard_slice,
        "pad": ops.shard_pad,
    }
    return op[kind](x, piece.dim, list(piece.blocks), axis, size, *([piece.units] if piece.units else []))

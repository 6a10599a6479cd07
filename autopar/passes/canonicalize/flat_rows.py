"""Attention over the rows of a batch that a model has joined into one runs in rows again, so that the batch stays
sharded: documents end with their row.

    q = reshape(linear(x [4, 16, E]), [64, H, D]);  segments [1, 64] of offsets [4, n]
    attention(q [1, H, 64, D], ..., segments)[0]
        -->
    attention(q [4, H, 16, D], ..., reshape(segments, [4, 16]))[0]

Offsets with a row for each row of the batch say so, but only a step knows: the last document of a row and the first one
of the next are compared, and equal ones are an error. Offsets in one row may join rows: they are left as they are.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from autopar.ir.graph import ancestors, arguments, tensor_operands
from autopar.rewrite.build import Build, Rewrite, calls, operand, shape_of

aten, ours = torch.ops.aten, torch.ops.autopar
_OTHER = ("bias", "key_mask", "sinks", "chunk", "dropout")  # facts that a row cannot take from the joined rows
CROSSES = (
    "varlen_attn: documents whose offsets have a row for each row of the batch end with their row, found one that goes "
    "on in the next row; begin and end the offsets of each row with its first token and its length, or pass offsets of "
    "all rows in one dim"
)


def in_rows(node: Node, build: Build) -> Node | None:
    """attention(q [1, H, R * S, D], ...)[0] --> attention(q [R, H, S, D], ...)[0]"""
    call = node.args[0]
    if not calls(call, ours.attention.default) or node.args[1] != 0 or len(operand(node).users) > 1:
        return None
    known = arguments(operand(node))
    q, k, v, segments = (known[name] for name in ("q", "k", "v", "segments"))
    if segments is None or shape_of(q)[0] > 1 or shape_of(q)[2] != shape_of(k)[2] or any(map(known.get, _OTHER)):
        return None
    size = _rows(q, segments)
    if size is None:
        return None
    rows, tokens = size
    given = [_apart(build, x, rows, tokens) for x in (q, k, v)]
    documents = _checked(build, build.reshape(segments, (rows, tokens)))
    facts = [documents if x is segments else x for x in operand(node).args[3:]]
    out = build(operator.getitem, build(ours.attention.default, *given, *facts), 0)
    joined = build(aten.permute.default, out, [1, 0, 2, 3])
    return build(aten.reshape.default, joined, list(shape_of(node)))


def _rows(q: Node, segments: Node) -> tuple[int, int] | None:
    """(rows, tokens of each): of a value [R, S, ...] that was reshaped to R * S tokens on the way to the queries, where
    the segments are made of an input [R, n, ...]."""
    inputs = {shape_of(x)[0] for x in ancestors([segments]) if x.op == "placeholder" and len(shape_of(x)) > 1}
    total, seen, queue = shape_of(q)[2], {q}, [q]
    while queue:
        x = queue.pop(0)
        for y in tensor_operands(x):
            shape = shape_of(y) if isinstance(y.meta["val"], torch.Tensor) else (total,)
            rows, tokens, *_ = (*shape, 0, 0)
            if calls(x, aten.reshape.default) and rows in inputs and rows > 1 and rows * tokens == total:
                return rows, tokens
            if total in shape and y not in seen:
                seen.add(y)
                queue.append(y)
    return None


def _apart(build: Build, x: Node, rows: int, tokens: int) -> Node:
    """[1, H, R * S, D] --> [R, H, S, D]"""
    _, heads, _, width = shape_of(x)
    return build(aten.permute.default, build.reshape(x, (heads, rows, tokens, width)), [1, 0, 2, 3])


def _checked(build: Build, segments: Node) -> Node:
    """Numbers of documents [R, S], moved by a number for each row, which is the difference to the row before."""
    rows, tokens = shape_of(segments)
    first, last = (build(aten.slice.Tensor, segments, 1, i, i + 1) for i in (0, tokens - 1))
    before = build(aten.sub.Tensor, build(aten.slice.Tensor, first, 0, 0, 1), 1)
    before = build(aten.cat.default, [before, build(aten.slice.Tensor, last, 0, 0, rows - 1)], 0)
    step = build(aten.sub.Tensor, first, before)
    watched = build(ours.watch.default, step, 1.0, float(torch.iinfo(torch.int32).max), None, CROSSES, True)
    return build(aten.add.Tensor, segments, watched)


TABLE: dict[Any, Rewrite] = {operator.getitem: in_rows}

"""A bias that is a number per key token and head lies in the cache as a part of the keys.

    scores = scale q k + b_j    -->    scale [q, 1 / scale] [k, b_j]

Types prove that b_j is of key token j alone, as they do for the key itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from autopar.ir.graph import arguments, set_argument
from autopar.passes.canonicalize.attention_calls import unrepeated
from autopar.rewrite.build import Build, shape_of, value_of

aten = torch.ops.aten


def is_column(x: Node) -> bool:
    """Whether a part of a bias is the same for all queries."""
    return len(shape_of(x)) < 2 or shape_of(x)[-2] == 1


def fold(node: Node, columns: Sequence[Node], build: Build) -> None:
    """Make keys and queries of an attention wider, by these parts of its bias."""
    known = arguments(node)
    q, k = known["q"], known["k"]
    (rows, heads, queries, _), (_, key_heads, keys, _) = shape_of(q), shape_of(k)
    bias = add_up(columns, build)
    assert bias is not None
    bias = build.cast(unrepeated(bias), value_of(k).dtype)
    if shape_of(bias)[1] == heads != key_heads:  # a number for each of the queries' heads that share a key
        group = heads // key_heads
        wide = build(aten.expand.default, bias, [rows, heads, 1, keys])
        apart = build(aten.reshape.default, wide, [rows, key_heads, group, keys])
        numbers = build(aten.transpose.int, apart, 2, 3)
        own = build(aten.eye.default, group, dtype=value_of(q).dtype, device=value_of(q).device)
        own = build(aten.mul.Tensor, own, 1 / known["scale"])
        own = build(aten.reshape.default, own, [1, 1, group, 1, group])
        own = build(aten.expand.default, own, [rows, key_heads, group, queries, group])
        ones = build(aten.reshape.default, own, [rows, heads, queries, group])
    else:
        wide = build(aten.expand.default, bias, [rows, key_heads, 1, keys])
        numbers = build(aten.transpose.int, wide, 2, 3)
        first = build(aten.slice.Tensor, q, 3, 0, 1)
        ones = build(aten.full_like.default, first, 1 / known["scale"])
    for name, x, more in (("q", q, ones), ("k", k, numbers)):
        wider = build(aten.cat.default, [x, more], -1)
        wider.meta["unfolded"] = x
        set_argument(node, name, wider)


def add_up(parts: Sequence[Node], build: Build) -> Node | None:
    """The sum of biases, [B|1, H|1, rows|1, columns]; None if there is none."""
    found: Node | None = None
    for x in parts:
        part = build.reshape(x, (*(1,) * (4 - len(shape_of(x))), *shape_of(x)))
        found = part if found is None else build(aten.add.Tensor, found, part)
    return found

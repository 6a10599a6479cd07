"""Attention within pieces of one row, whose lengths repeat, is attention over a batch of rows.

Models that read images of any size put the patches of all images into one row, and call attention once for each image
or window. If the lengths repeat n times, as those of n images of one size do, the row becomes n rows:

    a, b, c, d = split(q, [16, 8, 16, 8], 2) ...                        q, k, v: [1, heads, 48, width]
    cat([attention(a, ..)[0], .., attention(d, ..)[0]], 2)
        -->
    a, b = split(transpose(reshape(q, [heads, 2, 24, width]), 0, 1), [16, 8], 2) ...
    reshape(transpose(cat([attention(a, ..)[0], attention(b, ..)[0]], 2), 0, 1), [1, heads, 48, width])

    index(x, [[1, 0, 3, 2]])     -->     reshape(index_select(reshape(x, [2, 2, 32]), 1, [1, 0]), [4, 32])

So images do not meet, and can be sharded as examples are; and one call takes the place of n.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.ir.graph import arguments, getitem_index
from autopar.passes.canonicalize.constant_masks import constant
from autopar.rewrite.build import Build, Rewrite, calls, operand, shape_of

aten = torch.ops.aten
ATTENTION = torch.ops.autopar.attention.default
TENSORS = ("bias", "key_mask", "segments", "sinks", "seed")


@dataclass(frozen=True)
class _Pieces:
    """Whole queries, keys and values, the lengths of their pieces, and the other arguments of every attention.
    ``turned``: results have the sequence before the heads."""

    whole: tuple[Node, Node, Node]
    sizes: tuple[int, ...]
    facts: tuple[Any, ...]
    turned: bool


def attention_pieces(node: Node, build: Build) -> Node | None:
    """cat([attention(a, ..), attention(b, ..)], 2) --> attention over rows, where lengths repeat"""
    found = _pieces(node)
    times = 0 if found is None else _repetitions(found.sizes)
    if found is None or times < 2:
        return None
    sizes = list(found.sizes[: len(found.sizes) // times])
    rows = [_as_rows(build, x, times) for x in found.whole]
    splits = [build(aten.split_with_sizes.default, x, sizes, 2) for x in rows] if len(sizes) > 1 else []
    made = []
    for i in range(len(sizes)):
        q, k, v = [build(operator.getitem, split, i) for split in splits] or rows
        made.append(build(operator.getitem, build(ATTENTION, q, k, v, *found.facts), 0))
    out = build(aten.cat.default, made, 2) if len(made) > 1 else made[0]
    heads, width = shape_of(out)[1], shape_of(out)[3]
    joined = build.reshape(build(aten.transpose.int, out, 0, 1), (1, heads, sum(found.sizes), width))
    return build(aten.transpose.int, joined, 1, 2) if found.turned else joined


def _as_rows(build: Build, x: Node, rows: int) -> Node:
    """[1, heads, rows * length, width] -> [rows, heads, length, width]"""
    _, heads, length, width = shape_of(x)
    return build(aten.transpose.int, build.reshape(x, (heads, rows, length // rows, width)), 0, 1)


def _repetitions(sizes: Sequence[int]) -> int:
    """How often a pattern of lengths repeats: 2 for (16, 8, 16, 8), 1 for (16, 8)."""
    n = len(sizes)
    return next(n // p for p in range(1, n + 1) if n % p == 0 and tuple(sizes[:p]) * (n // p) == tuple(sizes))


def _pieces(node: Node) -> _Pieces | None:
    parts: list[Node] = list(arguments(node)["tensors"])
    turned = all(calls(x, aten.transpose.int) and sorted(x.args[1:]) == [1, 2] for x in parts)  # type: ignore[type-var]
    if len(parts) < 2 or arguments(node)["dim"] not in ((1, -3) if turned else (2, -2)):
        return None
    results = [operand(x) for x in parts] if turned else parts
    attentions = [operand(x) for x in results if getitem_index(x) == 0]
    if len(attentions) < len(parts) or not all(calls(x, ATTENTION) and len(x.users) == 1 for x in attentions):
        return None
    first, *others = map(arguments, attentions)
    facts = {name: value for name, value in first.items() if name not in ("q", "k", "v")}
    plain = all(facts[name] is None for name in TENSORS) and not facts["offset"]
    if not plain or any({n: given[n] for n in facts} != facts for given in others):
        return None
    splits = [_split([given[name] for given in (first, *others)]) for name in ("q", "k", "v")]
    q, k, v = (split if split is None or shape_of(operand(split))[0] == 1 else None for split in splits)
    if q is None or k is None or v is None or not _sizes(q) == _sizes(k) == _sizes(v):
        return None
    return _Pieces((operand(q), operand(k), operand(v)), _sizes(q), attentions[0].args[3:], turned)


def _split(parts: Sequence[Node]) -> Node | None:
    """The split along the sequence of which these are all the results, in order."""
    if any(getitem_index(x) != i for i, x in enumerate(parts)):
        return None
    split = operand(parts[0])
    whole = calls(split, aten.split_with_sizes.default) and all(operand(x) is split for x in parts)
    return split if whole and split.args[2] in (2, -2) and len(_sizes(split)) == len(parts) else None


def _sizes(split: Node) -> tuple[int, ...]:
    return tuple(arguments(split)["split_sizes"])


def index_of_blocks(node: Node, build: Build) -> Node | None:
    """index(x, [[1, 0, 3, 2]]) --> index_select(reshape(x, [2, 2, 32]), 1, [1, 0]): the same within each block"""
    known = arguments(node)
    x, index = known["self"], known["indices"][0]
    if len(known["indices"]) != 1 or index is None or len(shape_of(index)) != 1:
        return None
    places = constant(index)
    if places is None or places.dtype not in (torch.int64, torch.int32) or not len(places):
        return None
    rows, *rest = shape_of(x)
    blocks = _blocks(places, rows)
    if blocks < 2:
        return None
    if blocks == rows == len(places):
        return x  # every row stays where it is
    own = build(aten.slice.Tensor, index, 0, 0, len(places) // blocks)
    picked = build(aten.index_select.default, build.reshape(x, (blocks, rows // blocks, *rest)), 1, own)
    return build.reshape(picked, shape_of(node))


def _blocks(places: torch.Tensor, rows: int) -> int:
    """Into how many equal blocks rows can be cut, so that each is read by as many places, all in the same way."""
    for blocks in range(min(rows, len(places)), 1, -1):
        if rows % blocks == len(places) % blocks == 0:
            each = rows // blocks
            own = places.view(blocks, -1) - torch.arange(0, rows, each).unsqueeze(1)
            if bool(((own >= 0) & (own < each)).all()) and bool((own == own[0]).all()):
                return blocks
    return 1


TABLE: dict[Any, Rewrite] = {aten.cat.default: attention_pieces, aten.index.Tensor: index_of_blocks}

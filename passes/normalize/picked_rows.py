"""Rows that each example picks, or writes, for itself: an index that counts the examples is no index into all of them.

    index(x, [arange(4), i])               -->    reshape(gather(x, 1, expand(i, [4, 1, 32])), [4, 32])
    index(x, [arange(4)[:, None], i, j])   -->    the same, with i * size + j into both dims
    index_put(x, [arange(4), i], y)        -->    scatter(x, 1, expand(i, [4, 1, 32]), reshape(y, [4, 1, 32]))

So the end token's row of every text stays on the rank, and in the micro-batch, of its text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.ir.graph import arguments
from autopar.passes.normalize.constant_masks import constant
from autopar.rewrite.build import Build, Rewrite, shape_of, value_of

aten = torch.ops.aten


@dataclass(frozen=True)
class _Rows:
    """x as (examples, places, width), and which places of each example are meant [examples, rows, width]."""

    x: Node
    places: Node
    picked: tuple[int, ...]  # the shape of the indices together
    rest: tuple[int, ...]  # the dims that none of them is for


def picked_rows(node: Node, build: Build) -> Node | None:
    """index(x, [arange(4), i]) --> gather(x, 1, i)"""
    found = _rows(node, build)
    if found is None:
        return None
    return build.reshape(build(aten.gather.default, found.x, 1, found.places), shape_of(node))


def written_rows(node: Node, build: Build) -> Node | None:
    """index_put(x, [arange(4), i], y) --> scatter(x, 1, i, y)"""
    found = _rows(node, build)
    if found is None:
        return None
    values = _expanded(build, arguments(node)["values"], (*found.picked, *found.rest))
    values = build.reshape(values, shape_of(found.places))
    put = aten.scatter_add.default if arguments(node)["accumulate"] else aten.scatter.src
    return build.reshape(build(put, found.x, 1, found.places, values), shape_of(node))


def _rows(node: Node, build: Build) -> _Rows | None:
    known = arguments(node)
    x, indices = known["self"], [i for i in known["indices"] if i is not None]
    if len(indices) < 2 or list(known["indices"][: len(indices)]) != indices or not _counts(indices, shape_of(x)[0]):
        return None
    examples, *own = shape_of(x)
    inner, rest = own[: len(indices) - 1], own[len(indices) - 1 :]
    picked = torch.broadcast_shapes(*(shape_of(i) for i in indices))
    rows, width = math.prod(picked) // examples, math.prod(rest)
    at = build.reshape(_expanded(build, _place(build, indices[1:], inner), picked), (examples, rows, 1))
    places = _expanded(build, at, (examples, rows, width))
    return _Rows(build.reshape(x, (examples, math.prod(inner), width)), places, tuple(picked), tuple(rest))


def _counts(indices: list[Node], examples: int) -> bool:
    """Whether the first index is 0, 1, 2, ... along the first dim of what is picked, and the same along the others."""
    dims = max(len(shape_of(i)) for i in indices)
    own = shape_of(indices[0])
    if examples < 2 or any(value_of(i).dtype not in (torch.int64, torch.int32) for i in indices):
        return False
    if own != (examples, *own[1:]) or len(own) != dims:
        return False
    found = constant(indices[0])
    return found is not None and bool((found == torch.arange(examples).view(-1, *[1] * (dims - 1))).all())


def _place(build: Build, indices: list[Node], sizes: list[int]) -> Node:
    """Of several indices into dims of these sizes, one into all of them. Negative ones count from the end."""
    place: Any = None
    for index, size in zip(indices, sizes, strict=True):
        low = build(aten.lt.Scalar, index, 0)
        index = build(aten.where.self, low, build(aten.add.Tensor, index, size), index)
        place = index if place is None else build(aten.add.Tensor, build(aten.mul.Tensor, place, size), index)
    found: Node = build.cast(place, torch.int64)
    return found


def _expanded(build: Build, x: Node, shape: tuple[int, ...]) -> Node:
    return x if shape_of(x) == tuple(shape) else build(aten.expand.default, x, list(shape))


TABLE: dict[Any, Rewrite] = {aten.index.Tensor: picked_rows, aten.index_put.default: written_rows}

"""Indexing per example: an index that enumerates the examples does not mix them, so the batch can stay sharded.

    index(x, [arange(4), i])               -->    reshape(gather(x, 1, expand(i, [4, 1, 32])), [4, 32])
    index(x, [arange(4)[:, None], i, j])   -->    the same, with i * size + j into both dims
    index(x, [i, arange(4)])               -->    the same of permute(x, [1, 0, 2])
    index_put(x, [arange(4), i], y)        -->    scatter(x, 1, expand(i, [4, 1, 32]), reshape(y, [4, 1, 32]))
    index_put(x, [mask], y)                -->    where(unsqueeze(mask, 2), y, x), if y is the same for all it picks

So the row of each text's end token stays on the rank, and in the microbatch, of that text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.fx import Node

from autopar.ir.graph import arguments
from autopar.passes.canonicalize.constant_masks import constant
from autopar.rewrite.build import Build, Rewrite, operand, shape_of, value_of

aten = torch.ops.aten
T = TypeVar("T")


@dataclass(frozen=True)
class _Rows:
    """x as (examples, places, width), and the selected places of each example [examples, rows, width]. ``dim``: the dim
    of x that enumerates the examples."""

    x: Node
    places: Node
    dim: int
    picked: tuple[int, ...]  # the broadcast shape of the indices
    rest: tuple[int, ...]  # the dims that are not indexed


def per_example_index(node: Node, build: Build) -> Node | None:
    """index(x, [arange(4), i]) --> gather(x, 1, i)"""
    indices = list(arguments(node)["indices"])
    indexed = [d for d, i in enumerate(indices) if i is not None]
    if indexed and indexed != list(range(indexed[0], indexed[-1] + 1)):  # separated: the indexed dim comes first
        others = [d for d in range(len(shape_of(operand(node)))) if d not in indexed]
        x = build(aten.permute.default, operand(node), [*indexed, *others])
        return build(aten.index.Tensor, x, [indices[d] for d in indexed])
    found = _rows(node, build)
    if found is None:
        return None
    return build.reshape(build(aten.gather.default, found.x, 1, found.places), shape_of(node))


def written_rows(node: Node, build: Build) -> Node | None:
    """index_put(x, [arange(4), i], y) --> scatter(x, 1, i, y)"""
    indices = [i for i in arguments(node)["indices"] if i is not None]
    if indices and not math.prod(torch.broadcast_shapes(*map(shape_of, indices))):
        return operand(node)  # no place is written
    if len(indices) == 1 and value_of(indices[0]).dtype == torch.bool:
        return _masked(node, build)
    found = _rows(node, build)
    if found is None:
        return None
    values = _expanded(build, arguments(node)["values"], (*found.picked, *found.rest))
    values = build.reshape(values, shape_of(found.places))
    put = aten.scatter_add.default if arguments(node)["accumulate"] else aten.scatter.src
    written = build(put, found.x, 1, found.places, values)
    first, *others = _turned(shape_of(node), found.dim)
    made, dim = build.reshape(written, (first, *others)), found.dim
    back = [*range(1, dim + 1), 0, *range(dim + 1, len(shape_of(made)))]
    return build(aten.permute.default, made, back) if dim else made


def _masked(node: Node, build: Build) -> Node | None:
    """A mask is assigned a single value, whose shape does not depend on how many entries the mask selects."""
    known = arguments(node)
    x, values, indices = known["self"], known["values"], known["indices"]
    (first,) = (d for d, i in enumerate(indices) if i is not None)
    mask = indices[first]
    behind = len(shape_of(x)) - first - len(shape_of(mask))
    given = shape_of(values)
    if len(given) > behind:
        if given[len(given) - behind - 1] != 1:
            return None
        before, after = given[: len(given) - behind - 1], given[len(given) - behind :]
        values = build.reshape(values, (*before, *[1] * len(shape_of(mask)), *after))
    mask = build.reshape(mask, (*shape_of(mask), *[1] * behind))
    if known["accumulate"]:
        values = build(aten.add.Tensor, x, values)
    return build(aten.where.self, mask, values, x)


def _rows(node: Node, build: Build) -> _Rows | None:
    known = arguments(node)
    x, indices = known["self"], [i for i in known["indices"] if i is not None]
    if len(indices) < 2 or list(known["indices"][: len(indices)]) != indices:
        return None
    turns = ((dim, _turned(indices, dim)) for dim in range(len(indices)))
    turn = next(((dim, turned) for dim, turned in turns if _counts(turned, shape_of(x)[dim])), None)
    if turn is None:
        return None
    dim, indices = turn
    if dim:
        x = build(aten.permute.default, x, _turned(range(len(shape_of(x))), dim))
    examples, *own = shape_of(x)
    inner, rest = own[: len(indices) - 1], own[len(indices) - 1 :]
    picked = torch.broadcast_shapes(*(shape_of(i) for i in indices))
    rows, width = math.prod(picked) // examples, math.prod(rest)
    at = build.reshape(_expanded(build, _place(build, indices[1:], inner), picked), (examples, rows, 1))
    places = _expanded(build, at, (examples, rows, width))
    return _Rows(build.reshape(x, (examples, math.prod(inner), width)), places, dim, tuple(picked), tuple(rest))


def _turned(dims: Sequence[T], dim: int) -> list[T]:
    """The sequence with one of its entries moved to the front."""
    return [dims[dim], *dims[:dim], *dims[dim + 1 :]]


def _counts(indices: list[Node], examples: int) -> bool:
    """Whether the first index is 0, 1, 2, ... along the first dim of the result and constant along the others; or 0, 0,
    1, 1, ... along the only one."""
    own, together = shape_of(indices[0]), tuple(torch.broadcast_shapes(*map(shape_of, indices)))
    if examples < 2 or any(value_of(i).dtype not in (torch.int64, torch.int32) for i in indices):
        return False
    repeats = math.prod(own) // examples
    flat = own == together == (examples * repeats,) and repeats > 1
    if not flat and (own != (examples, *own[1:]) or len(own) != len(together)):
        return False
    found, rows = constant(indices[0]), torch.arange(examples)
    expected = rows.repeat_interleave(repeats) if flat else rows.view(-1, *[1] * (len(own) - 1))
    return found is not None and bool((found == expected).all())


def _place(build: Build, indices: list[Node], sizes: list[int]) -> Node:
    """One index into the joined dims of these sizes, from an index into each. Negative ones count from the end."""
    place: Any = None
    for index, size in zip(indices, sizes, strict=True):
        low = build(aten.lt.Scalar, index, 0)
        index = build(aten.where.self, low, build(aten.add.Tensor, index, size), index)
        place = index if place is None else build(aten.add.Tensor, build(aten.mul.Tensor, place, size), index)
    found: Node = build.cast(place, torch.int64)
    return found


def _expanded(build: Build, x: Node, shape: tuple[int, ...]) -> Node:
    return x if shape_of(x) == tuple(shape) else build(aten.expand.default, x, list(shape))


TABLE: dict[Any, Rewrite] = {aten.index.Tensor: per_example_index, aten.index_put.default: written_rows}

"""Lookups that are more than one: bags of the same length, and tables whose rows have a largest norm.

Embedding bags that all have the same length, such as the rows of [bags, length], are lookups and a reduction.

embedding_bag(w, reshape(ids, [-1]), arange(0, n, 4), mode="sum")[0]  -->  sum(embedding(w, reshape(ids, [-1, 4])), 1)

Bags of different lengths, or whose offsets are an input, are left as they are. So are bags whose gradients are scaled
by the frequency of a row, which bags count differently than lookups.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch.fx import Node

from autopar.ir.graph import arguments
from autopar.passes.canonicalize.constant_masks import constant
from autopar.rewrite.build import Build, Rewrite, calls, shape_of, value_of

aten = torch.ops.aten
SUM, MEAN, MAX = range(3)


def regular_bags(node: Node, build: Build) -> None:
    """embedding_bag(w, ids, arange(0, n, 4))[0] --> sum(embedding(w, reshape(ids, [-1, 4])), 1)"""
    known = arguments(node)
    length = _length(known["offsets"], shape_of(known["indices"])[0], bool(known["include_last_offset"]))
    if (
        not length
        or known["scale_grad_by_freq"]
        or not all(calls(u, operator.getitem) and u.args[1] == 0 for u in node.users)
    ):
        return
    made = _reduced(build, known, length)
    for user in list(node.users):
        user.replace_all_uses_with(made)
        node.graph.erase_node(user)


def _length(offsets: Node, entries: int, last_too: bool) -> int:
    """The length of all bags; 0 if lengths differ or depend on inputs."""
    starts = constant(offsets)
    if starts is None:
        return 0
    ends = [*starts.tolist(), *([] if last_too else [entries])]
    lengths = {b - a for a, b in itertools.pairwise(ends)}
    return lengths.pop() if len(lengths) == 1 and ends[0] == 0 and ends[-1] == entries else 0


def _reduced(build: Build, known: dict[str, Any], length: int) -> Node:
    weight, padding, mode = known["weight"], known.get("padding_idx", -1), known["mode"]
    ids = build.reshape(known["indices"], (shape_of(known["indices"])[0] // length, length))
    padding = -1 if padding is None else padding
    rows = build(aten.embedding.default, weight, ids, padding)
    if known["per_sample_weights"] is not None:
        rows = build(aten.mul.Tensor, rows, build.reshape(known["per_sample_weights"], (*shape_of(ids), 1)))
    out, counted = build(aten.ne.Scalar, ids, padding), padding >= 0
    if counted:
        left_out = build(aten.logical_not.default, build.reshape(out, (*shape_of(ids), 1)))
        rows = build(aten.masked_fill.Scalar, rows, left_out, float("-inf") if mode == MAX else 0.0)
    if mode == SUM:
        return build(aten.sum.dim_IntList, rows, [1])
    if mode == MAX:
        most = build(operator.getitem, build(aten.max.dim, rows, 1), 0)
        empty = build(aten.eq.Scalar, most, float("-inf"))
        return build(aten.masked_fill.Scalar, most, empty, 0.0) if counted else most
    if not counted:
        return build(aten.mean.dim, rows, [1])
    count = build.cast(build(aten.sum.dim_IntList, out, [1], True), value_of(rows).dtype)
    return build(aten.div.Tensor, build(aten.sum.dim_IntList, rows, [1]), build(aten.clamp_min.default, count, 1.0))


def limited_rows(node: Node, build: Build) -> Node:
    """embedding_renorm(w, ids, 1.0, 2.0), of nn.Embedding(max_norm=1.0): the rows that a batch looks up are scaled to
    the largest norm. Which are looked up is a count of each, a sum over the batch.

    --> counts = index_add(zeros, 0, ids, ones); n = linalg_vector_norm(w, 2.0, [1], True)
        where((counts > 0) & (n > 1.0), w * (1.0 / (n + 1e-7)), w)"""
    known = arguments(node)
    w, ids = known["self"], build.reshape(known["indices"], (value_of(known["indices"]).numel(),))
    kind = {"dtype": value_of(w).dtype, "device": value_of(w).device}
    zeros = build(aten.full.default, [shape_of(w)[0], 1], 0.0, **kind)
    ones = build(aten.full.default, [value_of(ids).numel(), 1], 1.0, **kind)
    counts = build(aten.index_add.default, zeros, 0, ids, ones)
    norm = build(aten.linalg_vector_norm.default, w, known["norm_type"], [1], True)
    factor = build(
        aten.mul.Scalar, build(aten.reciprocal.default, build(aten.add.Scalar, norm, 1e-7)), known["max_norm"]
    )
    chosen = build(
        aten.logical_and.default, build(aten.gt.Scalar, counts, 0), build(aten.gt.Scalar, norm, known["max_norm"])
    )
    return build(aten.where.self, chosen, build(aten.mul.Tensor, w, factor), w)


TABLE: dict[Any, Rewrite] = {
    aten.embedding_renorm.default: limited_rows,
    aten.embedding_bag.default: regular_bags,
    aten.embedding_bag.padding_idx: regular_bags,
}

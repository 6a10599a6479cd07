"""Norms as ordinary operators.

Batch norm in training: sums over the batch, with new running statistics as extra results. Weight norm: a weight is its
direction times its length.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Node

from autopar.ir.graph import arguments
from autopar.rewrite.build import Build, Rewrite, calls, shape_of, value_of

aten = torch.ops.aten


def _affine(build: Build, x: Node, known: dict[str, Any], shape: list[int]) -> Node:
    for name, op in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if known[name] is not None:
            x = build(op, x, build.reshape(known[name], shape))
    return x


def _channels(x: Node) -> tuple[list[int], list[int], int]:
    """(reduced dims, [1, C, 1, ...], values per channel)"""
    shape = shape_of(x)
    dims = [d for d in range(len(shape)) if d != 1]
    return dims, [shape[1] if d == 1 else 1 for d in range(len(shape))], math.prod(shape[d] for d in dims)


def _wide(build: Build, x: Node) -> Node:
    """In at least float32, the dtype that torch's kernels compute in."""
    return build.cast(x, torch.promote_types(value_of(x).dtype, torch.float32))


def _from_batch(build: Build, known: dict[str, Any]) -> tuple[Node, Node, Node]:
    """(normalized x, mean [C], variance [C], biased)"""
    x = _wide(build, known["input"])
    dims, shape, count = _channels(x)
    mean = build(aten.div.Tensor, build(aten.sum.dim_IntList, x, dims), count)
    centred = build(aten.sub.Tensor, x, build.reshape(mean, shape))
    squares = build(aten.sum.dim_IntList, build(aten.mul.Tensor, centred, centred), dims)
    variance = build(aten.div.Tensor, squares, count)
    scale = build(aten.rsqrt.default, build(aten.add.Tensor, variance, known["eps"]))
    out = build(aten.mul.Tensor, centred, build.reshape(scale, shape))
    return build.cast(_affine(build, out, known, shape), value_of(known["input"]).dtype), mean, variance


def _from_running(build: Build, known: dict[str, Any]) -> Node:
    x = _wide(build, known["input"])
    _, shape, _ = _channels(x)
    centred = build(aten.sub.Tensor, x, build.reshape(known["running_mean"], shape))
    scale = build(aten.rsqrt.default, build(aten.add.Tensor, known["running_var"], known["eps"]))
    out = _affine(build, build(aten.mul.Tensor, centred, build.reshape(scale, shape)), known, shape)
    return build.cast(out, value_of(known["input"]).dtype)


def _moved(build: Build, old: Node, new: Node, momentum: float) -> Node:
    """(1 - momentum) * old + momentum * new, without gradient"""
    new = build.cast(build(aten.detach.default, new), value_of(old).dtype)
    kept = build(aten.mul.Tensor, old, 1.0 - momentum)
    return build(aten.add.Tensor, kept, build(aten.mul.Tensor, new, momentum))


def functional_batch_norm(node: Node, build: Build) -> Node | None:
    """_native_batch_norm_legit_functional(x, w, b, mean, var, True, m, eps)[0, 3, 4] -->

    mu = div(sum(x), n); d = sub(x, mu); v = div(sum(mul(d, d)), n)
    0: add(mul(mul(d, rsqrt(add(v, eps))), w), b)   3: (1-m) mean + m mu   4: (1-m) var + m v n/(n-1)
    1: mu   2: rsqrt(add(v, eps))
    """
    known = arguments(node)
    outputs = {user.args[1]: user for user in node.users if calls(user, operator.getitem)}
    if not known.get("training", True):
        values: dict[Any, Node | None] = {0: _from_running(build, known)}
        values |= {3: known["running_mean"], 4: known["running_var"]}
    else:
        out, mean, variance = _from_batch(build, known)
        values = {0: out}
        if 1 in outputs or 2 in outputs:
            scale = build(aten.rsqrt.default, build(aten.add.Tensor, variance, known["eps"]))
            values |= {1: build(aten.detach.default, mean), 2: build(aten.detach.default, scale)}
        if 3 in outputs or 4 in outputs:
            _, _, count = _channels(known["input"])
            unbiased = build(aten.mul.Tensor, variance, count / max(count - 1, 1))
            values[3] = _moved(build, known["running_mean"], mean, known["momentum"])
            values[4] = _moved(build, known["running_var"], unbiased, known["momentum"])
    for position, user in outputs.items():
        value = values.get(position)
        if value is None:
            raise ValueError(
                "normalize: batch norm in evaluation has no statistics of its batch, found a use of them "
                f"({user.name}); compute them from the batch"
            )
        user.replace_all_uses_with(value)
        build.at.graph.erase_node(user)
    return None


def batch_norm(node: Node, build: Build) -> Node | None:
    """batch_norm(x, w, b, mean, var, False, m, eps) --> add(mul(mul(sub(x, mean), rsqrt(add(var, eps))), w), b)"""
    known = arguments(node)
    return _from_batch(build, known)[0] if known["training"] else _from_running(build, known)


def inference_batch_norm(node: Node, build: Build) -> Node | None:
    """_native_batch_norm_legit_no_training(...)[0] --> as batch_norm with training=False"""
    known = arguments(node)
    for user in list(node.users):
        if calls(user, operator.getitem) and user.args[1] == 0:
            user.replace_all_uses_with(_from_running(build, known))
            build.at.graph.erase_node(user)
    return None


def weight_norm(node: Node, build: Build) -> Node | None:
    """_weight_norm(v, g, 0) --> mul(v, div(g, linalg_vector_norm(v, 2, [1, ...], keepdim)))"""
    known = arguments(node)
    v, g, dim = known["v"], known["g"], known["dim"]
    rank = len(shape_of(v))
    others = [d for d in range(rank) if d != dim % rank] if dim != -1 else list(range(rank))
    length = build(aten.linalg_vector_norm.default, v, 2, others, dim != -1)
    return build(aten.mul.Tensor, v, build(aten.div.Tensor, g, length))


TABLE: dict[Any, Rewrite] = {
    aten._weight_norm.default: weight_norm,
    aten._native_batch_norm_legit_functional.default: functional_batch_norm,
    aten._native_batch_norm_legit.no_stats: functional_batch_norm,
    aten._native_batch_norm_legit_no_training.default: inference_batch_norm,
    aten.batch_norm.default: batch_norm,
}

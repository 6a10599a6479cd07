"""Every dense projection is `linear` on the unflattened value; every other product is `matmul`."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from autopar.ir.graph import arguments, reach
from autopar.rewrite.build import Build, Rewrite, calls, operand, shape_of, value_of

aten = torch.ops.aten


def _from_parameters(node: Node) -> bool:
    """Whether the value depends on parameters and buffers only (no input, no activation)."""
    inputs = (x for x in reach([node]) if x.op == "placeholder")
    return all(x.meta.get("kind") in ("parameter", "buffer") for x in inputs)


def _transposed(build: Build, w: Node) -> Node:
    """The transpose of a matrix; its base if w is itself a transpose."""
    dims = arguments(w) if calls(w, aten.transpose.int, aten.permute.default) else {}
    if calls(w, aten.t.default, aten.numpy_T.default, aten.transpose.int):
        return operand(w)
    if "dims" in dims and [d % 2 for d in dims["dims"]] == [1, 0]:
        return operand(w)
    return build(aten.t.default, w)


def _scaled(build: Build, x: Node, factor: float) -> Node:
    return x if factor == 1 else build(aten.mul.Tensor, x, factor)


def addmm(node: Node, build: Build) -> Node | None:
    """addmm(b, x, w) --> linear(x, t(w), b)   for a weight w; else add(b, matmul(x, w))"""
    known = arguments(node)
    bias, x, w = known["self"], known["mat1"], known["mat2"]
    plain = known["beta"] == 1 and known["alpha"] == 1
    if plain and _from_parameters(w) and shape_of(bias) == shape_of(w)[1:]:
        return build(aten.linear.default, x, _transposed(build, w), bias)
    product = _scaled(build, _product(build, x, w), known["alpha"])
    return build(aten.add.Tensor, _scaled(build, bias, known["beta"]), product)


def baddbmm(node: Node, build: Build) -> Node | None:
    """baddbmm(b, x, y, beta=b, alpha=a) --> add(mul(b, beta), mul(matmul(x, y), alpha))"""
    known = arguments(node)
    product = _scaled(build, build(aten.matmul.default, known["batch1"], known["batch2"]), known["alpha"])
    return build(aten.add.Tensor, _scaled(build, known["self"], known["beta"]), product)


def _product(build: Build, x: Node, w: Node) -> Node:
    dense = len(shape_of(w)) == 2 and len(shape_of(x)) >= 2 and _from_parameters(w)
    if dense:
        return build(aten.linear.default, x, _transposed(build, w))
    return build(aten.matmul.default, x, w)


def product(node: Node, build: Build) -> Node | None:
    """mm(x, w), matmul(x, w) --> linear(x, t(w))   for a weight w; bmm(x, y) --> matmul(x, y)"""
    x, w = operand(node), operand(node, 1)
    if calls(node, aten.matmul.default) and not (
        len(shape_of(w)) == 2 and len(shape_of(x)) >= 2 and _from_parameters(w)
    ):
        return None
    return _product(build, x, w)


def linear(node: Node, build: Build) -> Node | None:
    """linear(x, w) --> squeeze(linear(x, unsqueeze(w, 0)), -1)   where w is [I]; else before a reshape of x"""
    x, w = operand(node), operand(node, 1)
    if len(shape_of(w)) != 1:  # torch takes no bias with a vector
        return linear_before_reshape(node, build)
    return build(aten.squeeze.dim, build(aten.linear.default, x, build(aten.unsqueeze.default, w, 0)), -1)


def linear_before_reshape(node: Node, build: Build) -> Node | None:
    """linear(reshape(x, [B*S, H]), w) --> reshape(linear(x, w), [B*S, O])   where x is [B, S, H]"""
    flat = operand(node)
    if not calls(flat, aten.reshape.default):
        return None
    x = operand(flat)
    if len(shape_of(x)) <= len(shape_of(flat)) or shape_of(x)[-1] != shape_of(flat)[-1]:
        return None
    inner = build(aten.linear.default, x, *node.args[1:], **node.kwargs)
    return build.reshape(inner, shape_of(node))


def matmul_before_reshape(node: Node, build: Build) -> Node | None:
    """matmul(reshape(x, [B*H, S, D]), reshape(y, [B*H, D, T])) --> reshape(matmul(x, y), [B*H, S, T])"""
    x, y = operand(node), operand(node, 1)
    bases = [operand(n) if calls(n, aten.reshape.default) else n for n in (x, y)]
    left, right = (shape_of(b) for b in bases)
    unflattened = len(left) == len(right) > 3 and left[:-2] == right[:-2]
    if len(shape_of(x)) != 3 or not unflattened:
        return None
    if left[-2:] != shape_of(x)[-2:] or right[-2:] != shape_of(y)[-2:]:
        return None
    return build.reshape(build(aten.matmul.default, *bases), shape_of(node))


def matmul(node: Node, build: Build) -> Node | None:
    """A product with a weight becomes a linear; a product of reshapes moves before them."""
    return product(node, build) or matmul_before_reshape(node, build)


def einsum(node: Node, build: Build) -> Node | None:
    """einsum("bihd,bjhd->bhij", x, y) --> matmul(permute(x, b h i d), permute(y, b h d j))

    where each operand has one dim that the other lacks (the first may have several, if only the contracted dim is
    shared). All others keep einsum, which has a rule."""
    known = arguments(node)
    left, arrow, target = str(known["equation"]).replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != 2 or "." in left or any(len(set(t)) < len(t) for t in (*terms, target)):
        return None
    (own, other), (x, y) = terms, known["tensors"]
    batch = [c for c in target if c in own and c in other]
    rows, columns = ([c for c in target if c in a and c not in b] for a, b in ((own, other), (other, own)))
    summed = [c for c in own if c in other and c not in target]
    sizes: dict[str, set[int]] = {}
    for letter, size in zip(own + other, shape_of(x) + shape_of(y)):
        sizes.setdefault(letter, set()).add(size)
    plain = len(columns) == len(summed) == 1 and (len(rows) == 1 or (rows and not batch))
    if (
        not plain
        or any(len(found) > 1 for found in sizes.values())
        or set(own + other) != {*batch, *rows, *columns, *summed}
    ):
        return None
    product = build(
        aten.matmul.default,
        _ordered(build, x, own, [*batch, *rows, *summed]),
        _ordered(build, y, other, [*batch, *summed, *columns]),
    )
    return _ordered(build, product, "".join([*batch, *rows, *columns]), list(target))


def _ordered(build: Build, x: Node, letters: str, wanted: list[str]) -> Node:
    """The dims of x in another order."""
    order = [letters.index(letter) for letter in wanted]
    last = len(order) - 1
    if order == [*range(len(order))]:
        return x
    if order == [*range(last - 1), last, last - 1]:
        return build(aten.transpose.int, x, -2, -1)
    return build(aten.permute.default, x, order)


def detach(node: Node, build: Build) -> Node | None:
    """detach(x) --> x   where no gradient reaches x"""
    x = operand(node)
    return None if x.meta.get("has_gradient") and value_of(x).dtype.is_floating_point else x


TABLE: dict[Any, Rewrite] = {
    aten.addmm.default: addmm,
    aten.baddbmm.default: baddbmm,
    aten.mm.default: product,
    aten.bmm.default: product,
    aten.einsum.default: einsum,
    aten.matmul.default: matmul,
    aten.linear.default: linear,
    aten.detach.default: detach,
}

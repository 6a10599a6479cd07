"""Operators of several spellings have one: that which rules and costs know."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from autopar.ir.conversions import is_zeros
from autopar.ir.graph import arguments
from autopar.rewrite.build import Build, Rewrite, operand, shape_of, value_of

aten = torch.ops.aten
CONVOLUTIONS = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
TRANSPOSED = {1: aten.conv_transpose1d.default, 2: aten.conv_transpose2d.input, 3: aten.conv_transpose3d.input}


def convolution(node: Node, build: Build) -> Node | None:
    """convolution(x, w, b, ..., transposed=False) --> conv2d(x, w, b, ...)   as padding="same" is made of; a transposed
    one, as derivatives are made of: conv_transpose2d"""
    known = arguments(node)
    names = ["input", "weight", "bias", "stride", "padding", "groups", "dilation"]
    table = TRANSPOSED if known["transposed"] else CONVOLUTIONS
    target = table.get(len(shape_of(operand(node, 1))) - 2)
    if known["transposed"]:
        names.insert(5, "output_padding")
    else:
        names[5:] = ["dilation", "groups"]
    return build(target, *(known[name] for name in names)) if target is not None else None


def ones_of_a_number(node: Node, build: Build) -> Node | None:
    """ones_like(sum(x)) --> full([], 1)   as derivatives begin with: it needs no sum"""
    if shape_of(operand(node)):
        return None
    value = value_of(node)
    return build(aten.full.default, [], 1, dtype=value.dtype, device=value.device)


def addition(node: Node, build: Build) -> Node | None:
    """add(x, zeros) --> x   as a sum over layers begins: a pending sum passes"""
    known = arguments(node)
    for zeros, other in ((known["self"], known["other"]), (known["other"], known["self"])):
        if isinstance(other, Node) and is_zeros(zeros) and _alike(other, node) and known.get("alpha", 1) == 1:
            return other
    return None


def _alike(x: Node, y: Node) -> bool:
    a, b = x.meta["val"], y.meta["val"]
    return bool(a.dtype == b.dtype and a.shape == b.shape)


TABLE: dict[Any, Rewrite] = {
    aten.convolution.default: convolution,
    aten.ones_like.default: ones_of_a_number,
    aten.add.Tensor: addition,
}

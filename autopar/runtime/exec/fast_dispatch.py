"""The same operators by a shorter way: torch's own bindings cost a third of a call through `torch.ops`.

    mul = torch.ops.aten.mul.Tensor(a, b)          -->    mul = torch.mul(a, b)
    view = torch.ops.aten.view.default(x, [2, 3])  -->    view = x.reshape([2, 3])

`autopar::` operators call their kernels: nothing is differentiated or traced when a step graph runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from autopar.adapters.operators import OpOverload, kernel_of

aten = torch.ops.aten

# Arguments are given as in the schema: only functions that take them in the same order and by the same names are here.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add, aten.add.Scalar: torch.add, aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul, aten.mul.Scalar: torch.mul, aten.div.Tensor: torch.div, aten.div.Scalar: torch.div,
    aten.pow.Tensor_Scalar: torch.pow, aten.neg.default: torch.neg, aten.rsqrt.default: torch.rsqrt,
    aten.exp.default: torch.exp, aten.cos.default: torch.cos, aten.sin.default: torch.sin,
    aten.tanh.default: torch.tanh, aten.sigmoid.default: torch.sigmoid, aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm, aten.addmm.default: torch.addmm, aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze, aten.squeeze.dim: torch.squeeze, aten.permute.default: torch.permute,
    aten.cat.default: torch.cat, aten.sum.dim_IntList: torch.sum, aten.mean.dim: torch.mean,
    aten.split_with_sizes.default: torch.split_with_sizes, aten.where.self: torch.where,
    aten.embedding.default: torch.embedding, aten.clone.default: torch.clone, aten.reshape.default: torch.reshape,
}  # fmt: skip
METHODS: dict[Any, str] = {
    # reshape, for tracing does not know all strides: softplus_backward's fake is contiguous, its result is as its input
    aten.view.default: "reshape",
    aten._unsafe_view.default: "reshape",
    aten.expand.default: "expand",
}


IN_PLACE = {aten.add.Tensor: "add_", aten.addmm.default: "addmm_"}


def shorten(node: Node, overwritten: int | None = None) -> None:
    """Let a node of a lowered graph call its operator by the shorter way, where there is one. ``overwritten``: which
    operand its result may be written over (of two that are added, either)."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return
    if overwritten is not None and node.target in IN_PLACE:
        over, *others = (node.args[overwritten], *node.args[:overwritten], *node.args[overwritten + 1 :])
        node.op, node.target, node.args = "call_method", IN_PLACE[node.target], (over, *others)
    elif node.target in METHODS:
        if not node.kwargs:
            node.op, node.target = "call_method", METHODS[node.target]
    else:
        node.target = FUNCTIONS.get(node.target) or kernel_of(node.target) or node.target

"""Attention in the model's own words becomes `autopar::attention` with as many facts as can be read off."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from autopar.graph import arguments, set_argument
from autopar.passes.normalize.build import Build, Rewrite, calls, operand, shape_of, value_of

aten = torch.ops.aten


@dataclass
class Facts:
    """What is known about one attention; see `autopar.ops.attention`."""

    scale: float
    bias: Node | None = None
    key_mask: Node | None = None
    causal: bool = False
    dropout: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)


def attend(build: Build, q: Node, k: Node, v: Node, facts: Facts) -> Node:
    """autopar.attention(q, k, v, ...)[0], on key heads that are not repeated."""
    bases = _unrepeated(k), _unrepeated(v)
    if shape_of(bases[0])[1] == shape_of(bases[1])[1]:
        k, v = bases
    both = build(
        torch.ops.autopar.attention.default, q, k, v, facts.bias, facts.key_mask, None, None, None,
        facts.causal, 0, 0, 0, facts.scale, 0.0, facts.dropout, 0, [], [],
    )  # fmt: skip
    return build(operator.getitem, both, 0)


def _unrepeated(x: Node) -> Node:
    """reshape(expand(unsqueeze(k, 2), [B, Hk, n, S, D]), [B, Hk n, S, D]), repeat_interleave(k, n, 1) --> k"""
    if calls(x, aten.repeat_interleave.self_int) and arguments(x)["dim"] in (1, -3):
        return operand(x)
    if not calls(x, aten.reshape.default) or not calls(operand(x), aten.expand.default):
        return x
    narrow = operand(operand(x))
    base = operand(narrow) if calls(narrow, aten.unsqueeze.default, aten.reshape.default) else narrow
    shape = shape_of(base)
    if len(shape) != 4 or shape_of(narrow) != (*shape[:2], 1, *shape[2:]) or shape_of(x)[2:] != shape[2:]:
        return x
    return base


def sdpa(node: Node, build: Build) -> Node | None:
    """scaled_dot_product_attention(q, k, v, mask, p, causal) --> autopar.attention(q, k, v, bias, ...)[0]"""
    known = arguments(node)
    q, k, v = known["query"], known["key"], known["value"]
    scale = known["scale"] if known["scale"] is not None else 1.0 / math.sqrt(shape_of(q)[-1])
    facts = Facts(float(scale), causal=known["is_causal"], dropout=float(known["dropout_p"]))
    rank = len(shape_of(q))
    if rank not in (3, 4):
        raise ValueError(
            f"normalize: attention needs q of rank 3 or 4, found {list(shape_of(q))} at {node.name}; reshape the "
            "leading dims into one"
        )
    mask = known["attn_mask"]
    if rank == 3:  # one head
        q, k, v = (build(aten.unsqueeze.default, x, 1) for x in (q, k, v))
        mask = build(aten.unsqueeze.default, mask, 1) if mask is not None and len(shape_of(mask)) == 3 else mask
    if mask is not None:
        _add_mask(build, mask, q, facts)
    out = attend(build, q, k, v, facts)
    return build(aten.squeeze.dim, out, 1) if rank == 3 else out


def _add_mask(build: Build, mask: Node, q: Node, facts: Facts) -> None:
    """Bool [B, 1, 1, Sk] is a key mask; other masks are a bias of q's dtype, 0 and -inf for bool ones."""
    while calls(mask, aten.expand.default):
        mask = operand(mask)
    shape = (*(1,) * (4 - len(shape_of(mask))), *shape_of(mask))
    mask = build.reshape(mask, shape)
    batch = shape_of(q)[0]
    if value_of(mask).dtype == torch.bool and shape[1] == shape[2] == 1 and shape[0] in (1, batch):
        flat = build.reshape(mask, (shape[0], shape[3]))
        facts.key_mask = flat if shape[0] == batch else build(aten.expand.default, flat, [batch, shape[3]])
        return
    facts.bias = _additive(build, mask, value_of(q).dtype)


def _additive(build: Build, mask: Node, dtype: torch.dtype) -> Node:
    """where(mask, 0, -inf)"""
    if value_of(mask).dtype != torch.bool:
        return mask
    zero = build(aten.full.default, [], 0.0, dtype=dtype, device=value_of(mask).device)
    least = build(aten.full.default, [], float("-inf"), dtype=dtype, device=value_of(mask).device)
    return build(aten.where.self, mask, zero, least)


def zero_bias(node: Node, build: Build) -> Node | None:
    """autopar.attention(q, k, v, bias=zeros(...)) --> autopar.attention(q, k, v, None)"""
    bias = arguments(node)["bias"]
    while calls(bias, aten.expand.default, aten.slice.Tensor, aten.reshape.default):
        bias = operand(bias)
    if calls(bias, aten.zeros.default) or (calls(bias, aten.full.default) and bias.args[1] == 0):
        set_argument(node, "bias", None)
    return None


def pattern(node: Node, build: Build) -> Node | None:
    """matmul(dropout(softmax(mul(matmul(q, transpose(k, -1, -2)), s) + mask, -1)), v) --> autopar.attention(...)[0]

    for rank 4, with q.k scaled before or after, any number of additive masks and masked_fills with -inf (or the
    least finite number), and casts around the softmax. Anything else is left as it is.
    """
    weights, v = operand(node), operand(node, 1)
    if len(shape_of(node)) != 4 or len(shape_of(v)) != 4 or shape_of(weights)[:2] != shape_of(v)[:2]:
        return None
    facts = Facts(1.0)
    scores = _under_softmax(weights, facts)
    if scores is None:
        return None
    masks: list[Node] = []
    found = _product_under(build, scores, facts, masks)
    if found is None:
        return None
    q, k = found
    for mask in masks:
        facts.bias = mask if facts.bias is None else build(aten.add.Tensor, facts.bias, mask)
    return attend(build, q, k, v, facts)


def _under_softmax(x: Node, facts: Facts) -> Node | None:
    """The scores of dropout(cast(softmax(cast(scores)))); None if it is something else."""
    while True:
        if calls(x, operator.getitem) and calls(operand(x), aten.native_dropout.default):
            x = operand(x)
        if calls(x, aten.native_dropout.default, aten.dropout.default):
            known = arguments(x)
            facts.dropout = float(known["p"]) if known.get("train") else facts.dropout
        elif calls(x, aten.softmax.int, aten._softmax.default):
            last = arguments(x)["dim"] % len(shape_of(x)) == len(shape_of(x)) - 1
            return _uncast(operand(x)) if last else None
        elif not calls(x, aten._to_copy.default):
            return None
        x = operand(x)


def _uncast(x: Node) -> Node:
    return operand(x) if calls(x, aten._to_copy.default) and value_of(operand(x)).is_floating_point() else x


def _product_under(build: Build, x: Node, facts: Facts, masks: list[Node]) -> tuple[Node, Node] | None:
    """q and k of the scores; masks and factors met on the way are noted."""
    while not calls(x, aten.matmul.default):
        known = arguments(x) if x.op == "call_function" else {}
        if calls(x, aten.masked_fill.Scalar):
            if float(known["value"]) > torch.finfo(torch.float16).min / 2:
                return None
            keep = build(aten.logical_not.default, known["mask"])
            masks.append(_rank4(build, _additive(build, keep, value_of(x).dtype)))
            x = known["self"]
        elif calls(x, aten.add.Tensor):
            if known["alpha"] != 1 or facts.scale != 1.0 or not isinstance(known["other"], Node):
                return None
            scores, mask = known["self"], known["other"]
            if shape_of(scores) != shape_of(x):
                scores, mask = mask, scores
            if shape_of(scores) != shape_of(x) or not value_of(mask).is_floating_point():
                return None
            masks.append(_rank4(build, mask))
            x = scores
        elif calls(x, aten.mul.Tensor, aten.div.Tensor) and isinstance(known["other"], (int, float)):
            factor = float(known["other"])
            facts.scale *= factor if calls(x, aten.mul.Tensor) else 1.0 / factor
            x = known["self"]
        else:
            return None
    q, kt = operand(x), operand(x, 1)
    swapped = calls(kt, aten.transpose.int) and sorted(d % 4 for d in kt.args[1:]) == [2, 3]  # type: ignore[operator]
    if len(shape_of(x)) != 4 or not swapped:
        return None
    return q, operand(kt)


def _rank4(build: Build, mask: Node) -> Node:
    return build.reshape(mask, (*(1,) * (4 - len(shape_of(mask))), *shape_of(mask)))


TABLE: dict[Any, Rewrite] = {
    aten.scaled_dot_product_attention.default: sdpa,
    torch.ops.autopar.attention.default: zero_bias,
}

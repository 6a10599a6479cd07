"""Attention written out as matrix products and a softmax becomes `autopar::attention`.

    matmul(dropout(softmax(matmul(q, transpose(k, -1, -2)) * s + mask, -1)), v) --> autopar.attention(q, k, v, mask)[0]

Heads may have a dim of their own ([B, H, S, D]) or share one with the batch ([B·H, S, D]), and change between the two
on the way. Scores may be scaled (before or after the product, by numbers or by scalars of the graph), soft-capped
(cap · tanh(s / cap)), masked any number of times (additively, or filled with the least number by masked_fill or
where), and cast around the softmax. Anything else is left as it is.

A mask that is a triangle for all inputs becomes the flag *causal*; others become a bias.

The rewrite preserves the result exactly. Filled entries are not attended to, which is equivalent as long as the fill is
the least number after the scale and casts that follow. Rows in which all entries are filled get what the softmax gives
them (`empty_rows`). Probabilities after dropout are rewritten only if they have no other use: a second use would draw a
second mask.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autopar.ir.graph import arguments
from autopar.ir.meta import remembered
from autopar.ops.traits import PERMUTED
from autopar.passes.canonicalize.attention_calls import MatchedMask, additive, attend, mask_on_lead
from autopar.passes.canonicalize.constant_masks import LEAST, constant, filled_triangle, may_hide, triangle
from autopar.rewrite.build import Build, calls, operand, shape_of, value_of

aten = torch.ops.aten


@dataclass(frozen=True)
class _WrittenScores:
    """The operators between a softmax and ``at``: scores = cap(at · scale · factors) + masks, the last mask first.

    lead: batch and heads, once a value with a dim for each was found. casts: dtypes of the scores on the way, the
    softmax's first.
    """

    at: Node
    scale: float = 1.0
    factors: tuple[Node, ...] = ()
    softcap: float = 0.0
    masks: tuple[WrittenMask, ...] = ()
    dropout: float = 0.0
    casts: tuple[torch.dtype, ...] = ()
    lead: tuple[int, ...] = ()

    def to(self, at: Any, **changes: Any) -> _WrittenScores:
        """The same, one operator further up the graph."""
        shape = shape_of(self.at)
        lead = self.lead or (shape[:2] if len(shape) == 4 else ())
        return dataclasses.replace(self, at=at, lead=lead, **changes)


def match_sdpa(node: Node, build: Build) -> Node | None:
    """See the module's docstring."""
    weights, v = operand(node), operand(node, 1)
    if len(shape_of(node)) not in (3, 4) or shape_of(weights)[:-2] != shape_of(v)[:-2]:
        return None
    scores = _under_softmax(_WrittenScores(weights))
    found = _down_to_product(scores) if scores else None
    if found is None:
        return None
    empty = outcome(found.masks, found.dropout)
    if empty == "unknown":
        return None
    q, k = operand(found.at), _transposed(build, operand(found.at, 1))
    lead = found.lead or _batch_and_heads(q)
    for factor in found.factors:
        q = build(aten.mul.Tensor, q, factor)
    facts = MatchedMask(found.scale, softcap=found.softcap, dropout=found.dropout)
    for mask in found.masks:
        if mask.triangle == NEVER or (mask.triangle is not None and empty != "nan"):
            facts.causal = True
            continue
        said = mask.node if mask.keep else build(aten.logical_not.default, mask.node)
        bias = additive(build, mask_on_lead(build, said, mask.scores[:-2], lead), value_of(q).dtype)
        bias = bias if mask.factor == 1 else build(aten.mul.Tensor, bias, mask.factor)
        facts.bias = bias if facts.bias is None else build(aten.add.Tensor, facts.bias, bias)
    q, k, v = (build.reshape(x, (*lead, *shape_of(x)[-2:])) for x in (q, k, v))
    out, lse = attend(build, q, k, v, facts)
    return build.reshape(_with_empty_rows(build, out, lse, v, empty), shape_of(node))


def _with_empty_rows(build: Build, out: Node, lse: Node, v: Node, empty: str) -> Node:
    """out, where(lse == -inf, mean(v), out) or where(lse == -inf, nan, 1) * out"""
    if empty == "never":
        return out
    dtype, device = value_of(out).dtype, value_of(out).device
    rows = build(aten.unsqueeze.default, build(aten.eq.Scalar, lse, NEVER), -1)
    if empty == "mean":
        return build(aten.where.self, rows, build(aten.mean.dim, v, [2], True), out)
    nan, one = (build(aten.full.default, [], x, dtype=dtype, device=device) for x in (float("nan"), 1.0))
    return build(aten.mul.Tensor, out, build(aten.where.self, rows, nan, one))


# --- from the probabilities down to the product of q and k -----------------------------------------------------


def _under_softmax(found: _WrittenScores) -> _WrittenScores | None:
    """The scores of dropout(cast(softmax(scores)))."""
    once = True  # the product is the only user of the probabilities
    while True:
        x = found.at
        once = once and len(x.users) == 1
        if calls(x, operator.getitem) and calls(operand(x), aten.native_dropout.default):
            x = operand(x)
            once = once and len(x.users) == 1
        if calls(x, aten.native_dropout.default, aten.dropout.default):
            known = arguments(x)
            rate = float(known["p"]) if known["train"] or known["train"] is None else 0.0
            if rate and (found.dropout or not once):
                return None
            found = found.to(operand(x), dropout=rate or found.dropout)
        elif calls(x, aten.softmax.int, aten._softmax.default):
            last = arguments(x)["dim"] % len(shape_of(x)) == len(shape_of(x)) - 1
            return found.to(operand(x)) if last else None
        elif calls(x, aten._to_copy.default) or _keeps_matrices(x):
            found = found.to(operand(x))
        else:
            return None


def _down_to_product(found: _WrittenScores) -> _WrittenScores | None:
    while not calls(found.at, aten.matmul.default):
        if calls(found.at, aten.add.Tensor):
            return _under_sum(found)
        step = _scaled(found) or _capped(found) or _filled(found) or _same(found)
        if step is None:
            return None
        found = step
    q, k = (shape_of(operand(found.at, i)) for i in (0, 1))
    return found.to(found.at) if len(q) in (3, 4) and q[:-2] == k[:-2] else None


def _same(found: _WrittenScores) -> _WrittenScores | None:
    """The same scores in another dtype, or with batch and heads joined or split."""
    x = found.at
    if calls(x, aten._to_copy.default) and value_of(operand(x)).is_floating_point():
        return found.to(operand(x), casts=(*found.casts, value_of(x).dtype))
    return found.to(operand(x)) if _keeps_matrices(x) else None


def _keeps_matrices(x: Node) -> bool:
    """Whether a reshape changes leading dims only."""
    return calls(x, aten.reshape.default) and shape_of(x)[-2:] == shape_of(operand(x))[-2:]


def _scaled(found: _WrittenScores) -> _WrittenScores | None:
    """scores * 2.0, scores / 2.0; scores * scalar of the graph"""
    if not calls(found.at, aten.mul.Tensor, aten.div.Tensor):
        return None
    scores, other = found.at.args[:2]
    times = calls(found.at, aten.mul.Tensor)
    if isinstance(other, (int, float)):
        return found.to(scores, scale=found.scale * other if times else found.scale / other)
    if isinstance(other, Node) and not shape_of(other) and times and not found.softcap:
        return found.to(scores, factors=(*found.factors, other))
    return None


def _capped(found: _WrittenScores) -> _WrittenScores | None:
    """tanh(scores / cap), whose factor cap is known already."""
    if not calls(found.at, aten.tanh.default) or found.softcap or found.factors or found.scale <= 0:
        return None
    return found.to(operand(found.at), softcap=found.scale)


def _filled(found: _WrittenScores) -> _WrittenScores | None:
    """masked_fill(scores, mask, least), where(mask, scores, least)"""
    x, known = found.at, arguments(found.at)
    if calls(x, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        mask, fill, keep = known["mask"], _number(known["value"]), False
    elif calls(x, aten.where.self, aten.where.ScalarOther):
        mask, fill, keep = known["condition"], _number(known["other"]), True
    else:
        return None
    scores = known["self"]
    turned = found.softcap or found.factors or found.scale <= 0  # the least number here may not be the least score
    if turned or fill is None or shape_of(scores) != shape_of(x):
        return None
    for dtype in (value_of(x).dtype, *reversed(found.casts)):
        fill = float(torch.tensor(fill, dtype=torch.float64).to(dtype))
    fill *= found.scale
    for dtype in found.casts or (value_of(x).dtype,):
        fill = float(torch.tensor(fill, dtype=torch.float64).to(dtype))
    if not fill <= LEAST:
        return None
    return found.to(scores, masks=(*found.masks, WrittenMask(mask, shape_of(x), keep=keep, fill=fill)))


def _number(x: Any) -> float | None:
    """The value of a number, or of a node that is a constant number."""
    if calls(x, aten.full.default):
        return float(x.args[1])
    if calls(x, aten.scalar_tensor.default):
        return float(x.args[0])
    return float(x) if isinstance(x, (int, float)) else None


def _under_sum(found: _WrittenScores) -> _WrittenScores | None:
    """scores + mask, mask + scores"""
    x = found.at
    if found.softcap or found.factors or arguments(x)["alpha"] != 1:
        return None
    for scores, mask in (x.args[:2], x.args[1::-1]):
        if not isinstance(scores, Node) or not isinstance(mask, Node):
            return None
        if shape_of(scores) != shape_of(x) or not value_of(mask).is_floating_point():
            continue
        masks = (*found.masks, WrittenMask(mask, shape_of(x), found.scale))
        product = _down_to_product(found.to(scores, masks=masks))
        if product is not None:
            return product
    return None


# --- from the match to the arguments of the operator ----------------------------------------------------------


def _transposed(build: Build, x: Node) -> Node:
    """[.., D, S] as [.., S, D]: the base of a transpose."""
    while _keeps_matrices(x):
        x = operand(x)
    last = len(shape_of(x)) - 1
    if calls(x, *PERMUTED) and _order(x) == [*range(last - 1), last, last - 1]:
        return operand(x)
    return build(aten.transpose.int, x, -1, -2)


def _batch_and_heads(q: Node) -> tuple[int, int]:
    """B and H of q [B·H, S, D], read off the reshape that joined them. A dim that was never joined is a batch."""
    x, dim, joined = q, 0, shape_of(q)[0]
    while x.op == "call_function":
        if calls(x, *PERMUTED):
            dim = _order(x)[dim]
        elif calls(x, aten.reshape.default):
            before, outer = shape_of(operand(x)), torch.Size(shape_of(x)[:dim]).numel()
            starts = [d for d in range(len(before)) if torch.Size(before[:d]).numel() == outer and before[d] > 1]
            if not starts or joined % before[starts[0]]:
                break
            dim = starts[0]
            if before[dim] != joined:
                return before[dim], joined // before[dim]
        elif not calls(x, aten.mul.Tensor, aten.div.Tensor, aten._to_copy.default) or shape_of(operand(x)) != shape_of(
            x
        ):
            break
        x = operand(x)
    return joined, 1


def _order(x: Node) -> list[int]:
    """The original positions of the dims of a transposed or permuted value."""
    known, rank = arguments(x), len(shape_of(x))
    if "dims" in known:
        return [d % rank for d in known["dims"]]
    order = list(range(rank))
    a, b = known.get("dim0", 0) % rank, known.get("dim1", 1) % rank  # t has no dims
    order[a], order[b] = b, a
    return order


# --- rows that attend to no key ------------------------------------------------------------------------

NEVER = float("-inf")
MODERATE = LEAST / 2  # a bias above this masks nothing


@dataclass(frozen=True)
class WrittenMask:
    """A mask on scores of this shape. ``fill`` None: ``node`` times ``factor`` is added. Otherwise ``node`` is bool;
    entries equal to ``keep`` stay and the others become ``fill``, as the softmax sees it."""

    node: Node
    scores: tuple[int, ...]
    factor: float = 1.0
    keep: bool = True
    fill: float | None = None

    @property
    def triangle(self) -> float | None:
        """The number that replaces, or is added to, scores above the diagonal, if the mask does nothing else."""
        if self.fill is not None:
            return self.fill if _is_triangle(self.node, self.keep) else None
        above = triangle(self.node)
        return above * self.factor if above is not None and above * self.factor <= LEAST else None


def _is_triangle(node: Node, keep: bool) -> bool:
    return triangle(node) is not None if keep else remembered(node, "filled triangle", filled_triangle)


def outcome(masks: Sequence[WrittenMask], dropout: float = 0.0) -> str:
    """What written-out attention gives in rows that may attend to no key. ``masks``: the last that is applied first.

    `autopar::attention` gives 0 there. A softmax over written-out scores does not: scores that are all *filled* with
    one number have equal weights, so the row is the mean of all values; rows that are all -inf are 0/0. Large numbers
    that are *added* keep the differences between scores, which the operator reproduces.

        "never": every row has a key, or no mask can remove it          "mean", "nan": see above
        "unknown": anything else, such as fills with two numbers: do not rewrite

    Scores and learned biases are assumed to be no masks: far above `LEAST`.
    """
    masking = [m for m in masks if not _is_moderate(m)]
    finite = {m.fill for m in masks if m.fill is not None and m.fill > NEVER}
    if not masking or _every_row_has_a_key(masking):
        return "never"
    if not finite:
        return "nan"
    lowest = max(i for i, m in enumerate(masks) if m.fill in finite)
    alone = len(finite) == 1 and all(m.fill in finite for m in masking)
    return "mean" if alone and not dropout and all(m.fill is not None for m in masks[:lowest]) else "unknown"


def _is_moderate(mask: WrittenMask) -> bool:
    """Whether an additive mask masks nothing: constants that are not large, and learned or computed values."""
    if mask.fill is not None:
        return False
    value = constant(mask.node)
    if value is not None:
        return bool((value * mask.factor >= MODERATE).all())
    return not remembered(mask.node, "may_hide", may_hide)


def _every_row_has_a_key(masking: Sequence[WrittenMask]) -> bool:
    """Whether masks that depend on no input leave a key in every row. (The triangle leaves the first key.)"""
    if len(masking) == 1 and masking[0].triangle is not None:
        return True
    open_entries: list[Tensor] = []
    for mask in masking:
        value = constant(mask.node)
        if value is None:
            return False
        open_entries.append(value * mask.factor > MODERATE if mask.fill is None else value == mask.keep)
    together = open_entries[0]
    for entries in open_entries[1:]:
        together = together & entries
    return bool(together.any(-1).all())

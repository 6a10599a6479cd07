"""Attention as models spell it becomes `autopar::attention`, with as much of the mask as can be read off statically."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.ir.graph import arguments, set_argument
from autopar.passes.canonicalize.constant_masks import triangle
from autopar.rewrite.build import Build, Rewrite, calls, operand, shape_of, value_of

aten = torch.ops.aten
Shape = tuple[int, ...]


@dataclass
class MatchedMask:
    """What is known about one attention; see `autopar.ops.attention`."""

    scale: float
    bias: Node | None = None
    key_mask: Node | None = None
    causal: bool = False
    softcap: float = 0.0
    dropout: float = 0.0


def attend(build: Build, q: Node, k: Node, v: Node, facts: MatchedMask) -> tuple[Node, Node]:
    """out, log-sum-exp = autopar.attention(q, k, v, ...), on key heads before they are repeated."""
    bases = unrepeated(k), unrepeated(v)
    if shape_of(bases[0])[1] == shape_of(bases[1])[1]:
        k, v = bases
    both = build(
        torch.ops.autopar.attention.default, q, k, v, facts.bias, facts.key_mask, None, None, None,
        facts.causal, 0, 0, 0, facts.scale, facts.softcap, facts.dropout, 0, [], [], [],
    )  # fmt: skip
    return build(operator.getitem, both, 0), build(operator.getitem, both, 1)


def unrepeated(x: Node) -> Node:
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
    facts = MatchedMask(float(scale), causal=known["is_causal"], dropout=float(known["dropout_p"]))
    lead, mask = shape_of(q)[:-2], known["attn_mask"]
    flat = lead if len(lead) == 2 else (math.prod(lead[:-1]), lead[-1]) if lead[1:] else (math.prod(lead), 1)
    if flat != lead:
        if not lead or any(shape_of(x)[:-2] != lead for x in (k, v)):
            found = ", ".join(str(list(shape_of(x))) for x in (q, k, v))
            raise ValueError(
                f"normalize: attention needs equal leading dims of q, k and v, found {found} at {node.name}: expand"
            )
        q, k, v = (build.reshape(x, (*flat, *shape_of(x)[-2:])) for x in (q, k, v))
        mask = None if mask is None else mask_on_lead(build, mask, lead, flat)
    if mask is not None:
        _add_mask(build, mask, q, facts)
    out, _ = attend(build, q, k, v, facts)
    return build.reshape(out, shape_of(node))


def mask_on_lead(build: Build, mask: Node, scores: Shape, lead: Shape) -> Node:
    """A mask of scores with these leading dims as [B|1, H|1, n|1, m]: the leading dims are expanded, then joined or
    split into batch and heads like those of the scores: (1, 4, 1) of (2, 4, 3) with 8, 3 becomes (2, 4, 1), then 8, 1.
    A dim that broadcasts stays 1."""
    *own, rows, columns = (*(1,) * (len(scores) + 2 - len(shape_of(mask))), *shape_of(mask))
    mask = build.reshape(mask, (*own, rows, columns))
    cuts = (i for i in range(len(scores) + 1) if (math.prod(scores[:i]), math.prod(scores[i:])) == lead)
    at = next(cuts, None)
    if at is None:  # batch and heads share a dim
        joined, full = ((1, 1), own) if math.prod(own) == 1 else (lead, scores)
    else:
        pairs = ((own[:at], scores[:at]), (own[at:], scores[at:]))
        parts = [m if math.prod(m) == 1 else n for m, n in pairs]
        joined, full = tuple(map(math.prod, parts)), [*parts[0], *parts[1]]
    if list(full) != own:
        mask = build(aten.expand.default, mask, [*full, rows, columns])
    return build.reshape(mask, (*joined, rows, columns))


def _add_mask(build: Build, mask: Node, q: Node, facts: MatchedMask) -> None:
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
    facts.bias = additive(build, mask, value_of(q).dtype)


def additive(build: Build, mask: Node, dtype: torch.dtype) -> Node:
    """where(mask, 0, -inf)"""
    if value_of(mask).dtype != torch.bool:
        return mask
    device = value_of(mask).device
    zero, least = (build(aten.full.default, [], x, dtype=dtype, device=device) for x in (0.0, float("-inf")))
    return build(aten.where.self, mask, zero, least)


def known_bias(node: Node, build: Build) -> Node | None:
    """autopar.attention(q, k, v, bias=zeros(...)) --> autopar.attention(q, k, v, None); a triangle --> causal

    A triangle of large finite numbers is causal only without other masks: a row whose own keys are masked otherwise
    would attend to those above the diagonal as well.
    """
    known = arguments(node)
    bias = known["bias"]
    if bias is None:
        return None
    while calls(bias, aten.expand.default, aten.slice.Tensor, aten.reshape.default):
        bias = operand(bias)
    if calls(bias, aten.zeros.default) or (calls(bias, aten.full.default) and bias.args[1] == 0):
        set_argument(node, "bias", None)
    elif (above := triangle(known["bias"])) is not None and (above == float("-inf") or not _masks(known)):
        set_argument(node, "bias", None)
        set_argument(node, "causal", True)
    return None


def _masks(known: dict[str, Any]) -> bool:
    """Whether an attention has masks beside its bias."""
    return any(known[name] is not None for name in ("key_mask", "segments")) or bool(known["window"] or known["chunk"])


TABLE: dict[Any, Rewrite] = {
    aten.scaled_dot_product_attention.default: sdpa,
    torch.ops.autopar.attention.default: known_bias,
}

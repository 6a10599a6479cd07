"""Masks that hide a key by a number such as -1e4, as GPT and GPT-2 do, are written as such by -inf.

    add(mul(scores, b), (1 - b) * -1e4)    -->    masked_fill(scores, b == 0, -inf)      b: zeros and ones
    add(scores, (1 - b) * -1e4)            -->    add(scores, where(.., -inf, 0))
    where(b, scores, -1e4)                 -->    where(b, scores, -inf)

The probability of such a key is exp of the number less the row's largest score: 0 in every dtype, since scores are
assumed to be far above these numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autopar.compile.length_values import ends_in_softmax
from autopar.ir.graph import arguments, remove_dead_code, set_argument
from autopar.passes.canonicalize.constant_masks import LARGEST, LEAST, constant, filled_triangle, triangle
from autopar.rewrite.build import Build, calls, value_of

aten = torch.ops.aten
HIDES = -5000.0  # numbers that are meant to hide a key are below
_NEVER = float("-inf")
_FILLS = {  # operator: the argument with the number
    aten.masked_fill.Scalar: "value", aten.masked_fill.Tensor: "value",
    aten.where.ScalarOther: "other", aten.where.self: "other",
}  # fmt: skip


def harden(gm: GraphModule) -> None:
    """Rewrite such masks in a captured graph, in place, where the values of its constants are known."""
    for node in list(gm.graph.nodes):
        if calls(node, aten.sub.Tensor) and isinstance(node.args[1], Node) and _hidden(node.args[1], -1) is not None:
            build = Build(node)
            new = build(aten.add.Tensor, node.args[0], build(aten.neg.default, node.args[1]))
            node.replace_all_uses_with(new)
            _added(new)
        elif calls(node, aten.add.Tensor):
            _added(node)
        elif node.op == "call_function" and node.target in _FILLS:
            _filled(node)
        elif calls(node, aten.scaled_dot_product_attention.default):
            mask = arguments(node)["attn_mask"]
            if mask is not None and _hidden(mask) is not None:
                set_argument(node, "attn_mask", _hard(Build(node), mask))
    remove_dead_code(gm)


def _added(node: Node) -> None:
    if arguments(node)["alpha"] != 1:
        return
    for scores, mask in (node.args[:2], node.args[1::-1]):
        if not isinstance(scores, Node) or not isinstance(mask, Node) or (hidden := _hidden(mask)) is None:
            continue
        if value_of(scores).shape != value_of(node).shape or not ends_in_softmax(node):
            continue
        build = Build(node)
        if calls(scores, aten.mul.Tensor) and (kept := _multiplied(scores, ~hidden)) is not None:
            own, keep = kept
            new = build(aten.masked_fill.Scalar, own, build(aten.eq.Scalar, keep, 0), _NEVER)
        elif bool((constant(mask)[hidden] <= LEAST).all()):  # type: ignore[index]
            continue
        else:
            new = build(aten.add.Tensor, scores, _hard(build, mask))
        node.replace_all_uses_with(new)
        return


def _hidden(mask: Node, sign: int = 1) -> Tensor | None:
    """Which keys an additive mask [.., n, m] hides, if its other values are 0 and it leaves each query a key."""
    if not isinstance(mask.meta.get("val"), Tensor) or value_of(mask).dim() < 2:
        return None
    single = value_of(mask).shape[-2:] == (1, 1)  # of one token, which sees itself
    found = constant(mask)
    if found is None or not found.is_floating_point():
        return None
    hidden = found * sign <= HIDES
    if not single and 1 in found.shape[-2:]:
        return None
    fits = bool((hidden | (found == 0)).all()) and (single or bool(hidden.any())) and not bool(hidden.all(-1).any())
    return hidden if fits else None


def _multiplied(scores: Node, shown: Tensor) -> tuple[Node, Node] | None:
    """(x, b) of scores x * b, where b is 1 for keys that are shown and else 0."""
    for own, keep in (scores.args[:2], scores.args[1::-1]):
        if isinstance(own, Node) and isinstance(keep, Node) and value_of(own).shape == value_of(scores).shape:
            found = constant(keep)
            if found is not None and found.shape[-2:] == shown.shape[-2:] and bool((found == shown).all()):
                return own, keep
    return None


def _hard(build: Build, mask: Node) -> Node:
    like: dict[str, Any] = {"dtype": value_of(mask).dtype, "device": value_of(mask).device}
    never, zero = (build(aten.full.default, [], x, **like) for x in (_NEVER, 0.0))
    return build(aten.where.self, build(aten.le.Scalar, mask, HIDES), never, zero)


def _filled(node: Node) -> None:
    name = _FILLS[node.target]  # type: ignore[index]
    fill: Any = arguments(node)[name]
    if isinstance(fill, Node):
        found = constant(fill) if not value_of(fill).dim() else None
        fill = None if found is None else float(found)
    mask = arguments(node)["mask" if "mask" in arguments(node) else "condition"]
    scores = arguments(node)["self"]
    if fill is None or not LEAST < fill <= HIDES or not isinstance(scores, Node) or not ends_in_softmax(node):
        return
    if not _leaves_a_key(mask, name == "value"):
        return
    build = Build(node)
    hide = mask if name == "value" else build(aten.logical_not.default, mask)
    node.replace_all_uses_with(build(aten.masked_fill.Scalar, scores, hide, _NEVER))


def _leaves_a_key(mask: Node, fills: bool) -> bool:
    """Whether a bool mask of scores leaves each query a key. ``fills``: entries that are true are filled."""
    if value_of(mask).numel() > LARGEST:
        return filled_triangle(mask) if fills else triangle(mask) is not None
    said = constant(mask)
    return said is not None and said.dim() > 1 and not bool((said if fills else ~said).all(-1).any())

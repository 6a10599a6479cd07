"""The bias of an attention as a sum: masks of positions, biases of parameters, and one number per key token.

    masked_fill(expand(dt, [B, H, S, S]), later, least)    -->    dt [B, H, 1, S] + where(later, -inf, 0)
    add(learned, where(later, least, 0))                   -->    learned + where(later, least, 0)

Entries that are hidden, which means at most `LEAST`, may be other numbers that hide.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import Node

from autopar.ir.graph import arguments
from autopar.passes.canonicalize.attention_calls import additive
from autopar.passes.canonicalize.constant_masks import LEAST, constant
from autopar.rewrite.build import Build, calls, operand, shape_of, value_of

aten = torch.ops.aten
_FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
_WHERES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)
_LEADING = (aten.reshape.default, aten.expand.default, aten.unsqueeze.default, aten.clone.default, aten.alias.default)


def terms(x: Node, build: Build, of_ids: Callable[[Node], bool]) -> list[Node]:
    """Values [.., rows|1, columns|1] whose sum, broadcast to a bias [.., rows, columns], is the bias. ``of_ids``:
    whether a value depends on the ids; masks that do are not taken apart."""
    if constant(x) is not None:
        return [x]
    if calls(x, aten.add.Tensor) and all(isinstance(y, Node) for y in x.args) and arguments(x)["alpha"] == 1:
        return [y for one in x.args for y in terms(one, build, of_ids)]  # type: ignore[arg-type]
    if (filled := _filled(x)) is not None and not of_ids(filled[1]):
        kept, mask, keep = filled
        said = mask if keep else build(aten.logical_not.default, mask)
        return [*terms(kept, build, of_ids), additive(build, said, value_of(x).dtype)]
    if calls(x, aten._to_copy.default) and value_of(operand(x)).is_floating_point():
        return [build.cast(y, value_of(x).dtype) for y in terms(operand(x), build, of_ids)]
    if calls(x, aten.mul.Tensor, aten.div.Tensor) and isinstance(x.args[1], (int, float)) and x.args[1] > 0:
        return [build(x.target, y, x.args[1]) for y in terms(operand(x), build, of_ids)]  # type: ignore[arg-type]
    if calls(x, *_LEADING) and _keeps_matrices(x):
        return [_lead(build, y, shape_of(operand(x)), shape_of(x), x) for y in terms(operand(x), build, of_ids)]
    return [x]


def _filled(x: Node) -> tuple[Node, Node, bool] | None:
    """(values, mask, what the mask says of entries that stay) of values that are filled with a number that hides."""
    if not calls(x, *_FILLS, *_WHERES):
        return None
    known = arguments(x)
    if calls(x, *_FILLS):
        choices = [(known["self"], known["mask"], False, known["value"])]
    else:
        choices = [
            (known["self"], known["condition"], True, known["other"]),
            (known["other"], known["condition"], False, known["self"]),
        ]
    for kept, mask, keep, fill in choices:
        if isinstance(kept, Node) and hides(fill):
            return kept, mask, keep
    return None


def hides(fill: object) -> bool:
    """Whether a number, or a node whose values are known, is at most `LEAST`."""
    if isinstance(fill, Node):
        found = constant(fill)
        return found is not None and bool((found <= LEAST).all())
    return isinstance(fill, (int, float)) and fill <= LEAST


def _keeps_matrices(x: Node) -> bool:
    """Whether a view changes leading dims, or repeats rows or columns."""
    before, after = shape_of(operand(x)), shape_of(x)
    if len(before) < 2 or len(after) < 2:
        return False
    if calls(x, aten.expand.default):
        return True
    return before[-2:] == after[-2:]


def _lead(build: Build, y: Node, before: tuple[int, ...], after: tuple[int, ...], view: Node) -> Node:
    """A term of the operand of a view as a term of the view."""
    lead, matrix = shape_of(y)[:-2], shape_of(y)[-2:]
    if calls(view, aten.expand.default):
        return y
    if math.prod(lead) == 1:
        return build.reshape(y, matrix)
    full = [*before[:-2], *matrix]
    if list(shape_of(y)) != full:
        y = build(aten.expand.default, y, full)
    return build.reshape(y, (*after[:-2], *matrix))

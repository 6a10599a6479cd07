"""What written-out attention gives in rows that may attend to nothing, where that can be told.

`autopar::attention` gives 0 there. A softmax over written-out scores does not: scores that are all *filled* with one
number have equal weights, so the row is the mean of all values; scores of which -inf is left are 0/0. Large numbers
that are *added* leave the scores beneath them, which the operator computes as they are.

    outcome(masks)      "never": every row has a key, or no mask can take it away       "mean", "nan": see above
                        "unknown": something else, such as fills with two numbers: not to be rewritten

Scores themselves, and biases that are learned, are taken to be no masks: far above `LEAST`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from autopar.ir.graph import ancestors, has_gradient
from autopar.ir.meta import remembered
from autopar.passes.canonicalize.constant_masks import LEAST, constant, triangle
from autopar.rewrite.build import shape_of, value_of

NEVER = float("-inf")
MODERATE = LEAST / 2  # what is added and is more than this masks nothing


@dataclass(frozen=True)
class WrittenMask:
    """Of scores of this shape. ``fill`` is None: ``node`` times ``factor`` is added. Else ``node`` is bool, entries
    that are ``keep`` stay and the others are ``fill``, as the softmax sees it."""

    node: Node
    scores: tuple[int, ...]
    factor: float = 1.0
    keep: bool = True
    fill: float | None = None

    @property
    def triangle(self) -> float | None:
        """What takes the place of, or is added to, scores above the diagonal, if that is all the mask says."""
        if self.fill is not None:
            return self.fill if _is_triangle(self.node, self.keep) else None
        above = triangle(self.node)
        return above * self.factor if above is not None and above * self.factor <= LEAST else None


def _is_triangle(node: Node, keep: bool) -> bool:
    return triangle(node) is not None if keep else remembered(node, "filled triangle", _is_filled_triangle)


def _is_filled_triangle(node: Node) -> bool:
    found = constant(node) if len(shape_of(node)) > 1 and min(shape_of(node)[-2:]) > 1 else None
    return found is not None and bool((found == torch.ones_like(found).triu(1)).all())


def outcome(masks: Sequence[WrittenMask], dropout: float = 0.0) -> str:
    """See the module's docstring. ``masks``: the last that is applied first."""
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
    """Whether what is added masks nothing: constants that are not large, and what is learned."""
    if mask.fill is not None:
        return False
    value = constant(mask.node)
    if value is not None:
        return bool((value * mask.factor >= MODERATE).all())
    sources = [n for n in ancestors([mask.node]) if n.op == "placeholder"]
    return has_gradient(mask.node) and all(_is_learned(n) for n in sources)


def _is_learned(source: Node) -> bool:
    """A parameter with a gradient, or indices into one that the model holds."""
    kind = source.meta.get("kind")
    return (kind == "parameter" and has_gradient(source)) or (
        kind in ("buffer", "constant") and value_of(source).dtype in (torch.int64, torch.int32)
    )


def _every_row_has_a_key(masking: Sequence[WrittenMask]) -> bool:
    """By masks that no input decides. (The triangle's rows have the first key.)"""
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

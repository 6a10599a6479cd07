"""Arguments of `autopar::attention` that say what a mask function says.

    (q >= k) & (q - k < 128)                  causal, window = 128
    document[b, q] == document[b, k]          segments = document
    k < length[b]                             key_mask
    (q >= k) | (k < prefix[b])                a bias: computed for all pairs, with the reason

A part that depends on positions alone is recognised by its values: it is computed, and compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.adapters.dispatch import without_modes
from autopar.capture.flex.expressions import Expression, conjuncts, renamed, value

BATCH, HEAD, QUERY, KEY, SCORE = "b", "h", "q", "k", "score"
_AT_ONCE = 2**24  # pairs that are computed at once
_SPREAD = 1 << 20  # documents of documents: more than there are of either in a row


@dataclass
class MaskArguments:
    """As in `autopar.ops.mask_spec.MaskSpec`. whole: what is left, bool [B|1, Hq|1, Sq, Sk], and why."""

    causal: bool = False
    window: int = 0
    chunk: int = 0
    key_mask: Tensor | None = None
    segments: Tensor | None = None
    whole: Tensor | None = None
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sizes:
    """Of the scores."""

    batch: int
    heads: int
    queries: int
    keys: int

    def variables(self, device: torch.device, first: int = 0, last: int | None = None) -> dict[str, Tensor]:
        """Per name its values, with four dims; of the queries those from ``first`` to ``last``."""
        sizes = {BATCH: self.batch, HEAD: self.heads, QUERY: self.queries, KEY: self.keys}
        made = {name: torch.arange(size, device=device) for name, size in sizes.items()}
        made[QUERY] = made[QUERY][first:last]
        return {name: x.view([-1 if i == dim else 1 for i in range(4)]) for dim, (name, x) in enumerate(made.items())}


def mask_arguments(masks: Sequence[Any], sizes: Sizes, device: torch.device) -> MaskArguments:
    """The arguments for the expressions of masks that all hold."""
    found, variables = MaskArguments(), sizes.variables(device)
    parts = [part for mask in masks for part in conjuncts(mask) if part is not True]
    by_position = [part for part in parts if _by_position(part)]
    rest = [part for part in parts if not _by_position(part)]
    if by_position and not _recognised(by_position, sizes, found):
        rest += by_position
    for part in rest:
        if isinstance(part, Expression) and _separates_documents(part, sizes):
            ids = _of_keys(part.args[1] if KEY in part.args[1].names else part.args[0], sizes, variables)
            found.segments = ids if found.segments is None else found.segments * _SPREAD + ids
        elif isinstance(part, Expression) and KEY in part.names and part.names <= {BATCH, KEY}:
            seen = _of_keys(part, sizes, variables).bool()
            found.key_mask = seen if found.key_mask is None else found.key_mask & seen
        else:
            seen = torch.as_tensor(value(part, variables), device=device).bool()
            found.whole = seen if found.whole is None else found.whole & seen
            found.reasons.append(_why(part))
    if found.whole is not None:
        lead = found.whole.shape[:2] if found.whole.dim() == 4 else (1, 1)
        found.whole = found.whole.expand(*lead, sizes.queries, sizes.keys)
    return found


def _why(part: Any) -> str:
    if not isinstance(part, Expression):
        return "it is the same for all pairs"
    if part.names <= {QUERY, KEY} and not part.tensors:
        return f"{part} is no triangle, window or chunk"
    return f"{part} depends on {', '.join(sorted(part.names)) or 'no position'} in a way that no argument says"


def _by_position(part: Any) -> bool:
    return isinstance(part, Expression) and part.names <= {QUERY, KEY} and not part.tensors


def _separates_documents(part: Expression, sizes: Sizes) -> bool:
    """Whether it says f(b, q) == f(b, k) for integers."""
    if part.name != "eq" or len(part.args) != 2 or sizes.queries != sizes.keys:
        return False
    if not all(isinstance(x, Expression) for x in part.args):
        return False
    of_query, of_key = sorted(part.args, key=lambda x: KEY in x.names)
    if QUERY not in of_query.names or not of_query.names <= {BATCH, QUERY}:
        return False
    integers = all(not x.is_floating_point() for x in of_key.tensors)
    return integers and renamed(of_query, of_key, {QUERY: KEY})


def _of_keys(expression: Expression, sizes: Sizes, variables: dict[str, Tensor]) -> Tensor:
    """An expression of b and k as [B, Sk]."""
    found: Tensor = value(expression, variables)
    return found.expand(found.shape[0], 1, 1, sizes.keys)[:, 0, 0].expand(sizes.batch, sizes.keys)


# --- positions alone ---------------------------------------------------------------------------------------


def _recognised(parts: list[Any], sizes: Sizes, found: MaskArguments) -> bool:
    """Whether causal, window and chunk say the same as the parts; then they are set."""
    with without_modes():
        causal, far, first = True, 0, 0
        for _, seen, distance in _rows(parts, sizes):
            causal = causal and not bool((seen & (distance < 0)).any())
            far = max(far, int(distance.abs().masked_fill(~seen, 0).max()))
            first += int(seen[:, 0].sum())
        longest = max(sizes.queries, sizes.keys)
        window = far + 1 if far + 1 < longest else 0
        for kind in dict.fromkeys(((causal, window, 0), (causal, 0, first))):
            if kind[2] in range(0, longest) and all(
                torch.equal(seen, _said(kind, start, distance)) for start, seen, distance in _rows(parts, sizes)
            ):
                found.causal, found.window, found.chunk = kind
                return True
    return False


def _rows(parts: list[Any], sizes: Sizes) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Per block of rows: the first row, what is seen [n, Sk], and query - key [n, Sk]."""
    step = max(1, _AT_ONCE // sizes.keys)
    for start in range(0, sizes.queries, step):
        variables = sizes.variables(torch.device("cpu"), start, start + step)
        distance = (variables[QUERY] - variables[KEY])[0, 0]
        seen = torch.ones_like(distance, dtype=torch.bool)
        for part in parts:
            seen = seen & value(part, variables).bool().expand(1, 1, *distance.shape)[0, 0]
        yield start, seen, distance


def _said(kind: tuple[bool, int, int], start: int, distance: Tensor) -> Tensor:
    """What the arguments causal, window and chunk let a block of rows see."""
    causal, window, chunk = kind
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen = seen & (distance >= 0)
    if window:
        seen = seen & (distance.abs() < window)
    if chunk:
        keys = torch.arange(distance.shape[1])
        rows = torch.arange(start, start + distance.shape[0])[:, None]
        seen = seen & (rows // chunk == keys // chunk)
    return seen

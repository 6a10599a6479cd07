"""The sizes of outputs without padding, learned from one batch that was evaluated twice, with and without padding.

    tokens   8 -> 64      log_probs [4, 7] -> [4, 63]      its dim 1 is the tokens less one

A dim that grows by as many as the examples or the tokens did is one of theirs, and padding is at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

Sizes = Mapping[str, int]  # "rows", and the tokens of each input


class Grown(NamedTuple):
    """A dim of ``more`` than the size of ``name``; ``rows``: of examples times that size."""

    name: str
    more: int
    rows: bool = False


Growth = tuple[Grown | None, ...]  # per dim; None: it does not depend on the batch


def growth_of(short: Tensor, padded: Tensor, before: Sizes, after: Sizes) -> Growth | None:
    """How the dims of an output follow from the sizes of the batch. None if they do so in no known way."""
    if short.dim() != padded.dim():
        return None
    found: list[Grown | None] = []
    for small, large in zip(short.shape, padded.shape, strict=True):
        if small == large:
            found.append(None)
            continue
        grown = (n for n in before if after[n] - before[n] == large - small)
        flat = (n for n in before if n != "rows" and small == before["rows"] * before[n])
        options = [Grown(n, small - before[n]) for n in grown]
        options += [Grown(n, 0, True) for n in flat if large == after["rows"] * after[n]]
        if not options:
            return None
        found.append(min(options, key=lambda option: abs(option.more)))
    return tuple(found)


def without_padding(x: Tensor, growth: Growth, own: Sizes, padded: Sizes) -> Tensor:
    """An output of a batch of ``padded`` sizes as that of its ``own`` sizes."""
    for dim, grown in enumerate(growth):
        if grown is None:
            continue
        if grown.rows:
            x = x.unflatten(dim, (padded["rows"], padded[grown.name]))
            x = x.narrow(dim, 0, own["rows"]).narrow(dim + 1, 0, own[grown.name]).flatten(dim, dim + 1)
        else:
            x = x.narrow(dim, 0, max(own[grown.name] + grown.more, 0))
    return x


def differences(short: Sequence[Tensor], cut: Sequence[Tensor]) -> list[float]:
    """Of each pair, the largest difference relative to the largest value; where that is NaN, 0."""
    found = []
    for a, b in zip(short, cut, strict=True):
        if a.shape != b.shape:
            return [float("inf")]
        x, y = a.detach().double(), b.detach().double()
        largest = float((x - y).abs().max()) / max(float(x.abs().max()), 1e-6) if x.numel() else 0.0
        found.append(largest if largest == largest else 0.0)
    return found

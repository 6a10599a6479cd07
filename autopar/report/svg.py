"""Shared by pictures: the frame, coordinates, ticks of an axis."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable

WIDTH = 1000


def framed(kind: str, label: str, style: str, height: float, parts: Iterable[str]) -> str:
    """SVG text of a picture of class ``kind`` with a background."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" viewBox="0 0 {WIDTH} {px(height)}" width="{WIDTH}" '
        f'role="img" aria-label="{html.escape(label)}">\n<style>{style}</style>\n'
        f'<rect class="back" width="{WIDTH}" height="{px(height)}" rx="8"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def ticks(span: float, most: int = 12) -> list[float]:
    """Round values from 0 to ``span``, at most ``most`` + 1 of them."""
    if span <= 0:
        return [0.0]
    step = 10.0 ** math.floor(math.log10(span / most))
    step = next(step * f for f in (1, 2, 5, 10, 20) if span / (step * f) <= most)
    return [step * i for i in range(math.floor(span / step * (1 + 1e-9)) + 1)]


def px(value: float) -> str:
    """A coordinate, short."""
    return f"{value:.2f}".rstrip("0").rstrip(".")

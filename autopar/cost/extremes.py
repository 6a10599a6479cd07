"""The most and the least of numbers or of sympy expressions: formulas of prices are evaluated over either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

NUMBERS = frozenset((int, float, np.float64))


def most(*values: Any) -> Any:
    """The largest."""
    return max(values) if NUMBERS.issuperset(map(type, values)) else _extreme("Max", values)


def least(*values: Any) -> Any:
    """The smallest."""
    return min(values) if NUMBERS.issuperset(map(type, values)) else _extreme("Min", values)


def most_of_each(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The larger of each two entries."""
    if object in (a.dtype, b.dtype):
        return np.array([most(*pair) for pair in zip(a, b, strict=True)], dtype=object)
    found: np.ndarray = np.maximum(a, b)
    return found


def plain(value: Any) -> Any:
    """A number of numpy as one of Python, which is faster; others as they are."""
    return value.item() if isinstance(value, np.generic) else value


def _extreme(name: str, values: Sequence[Any]) -> Any:
    distinct = dict.fromkeys(values)
    if len(distinct) == 1:
        return values[0]
    import sympy  # slow to import

    return getattr(sympy, name)(*map(sympy.sympify, distinct), evaluate=False)

"""The most and the least of numbers or of sympy expressions: formulas of prices are evaluated over either. Loads no
numpy and no sympy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NUMBERS = frozenset((int, float))


def most(*values: Any) -> Any:
    """The largest."""
    return max(values) if _are_numbers(values) else _extreme("Max", values)


def least(*values: Any) -> Any:
    """The smallest."""
    return min(values) if _are_numbers(values) else _extreme("Min", values)


def _are_numbers(values: Sequence[Any]) -> bool:
    """Also those of numpy, after the quick answer for all others."""
    return NUMBERS.issuperset(map(type, values)) or all(isinstance(value, (int, float)) for value in values)


def _extreme(name: str, values: Sequence[Any]) -> Any:
    distinct = dict.fromkeys(values)
    if len(distinct) == 1:
        return values[0]
    import sympy  # slow to import

    return getattr(sympy, name)(*map(sympy.sympify, distinct), evaluate=False)

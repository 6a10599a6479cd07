"""Key parts for plain values, where Python's equality is too coarse."""

from __future__ import annotations

from typing import Any


def told_apart(x: Any) -> tuple[Any, Any]:
    """A plain value as part of a key: 1, 1.0 and True differ, 0.0 and -0.0 differ, and nan equals nan."""
    return (type(x), repr(x)) if type(x) in (float, complex) else (type(x), x)


class Same:
    """A key that compares an object by identity, and keeps it alive."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)

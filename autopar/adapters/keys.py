"""Numbers, texts and the like as parts of keys, where Python's own equality is too coarse."""

from __future__ import annotations

from typing import Any


def told_apart(x: Any) -> tuple[Any, Any]:
    """A number, text or the like as a part of a key: 1, 1.0 and True are three, so are 0.0 and -0.0, and nan is nan."""
    return (type(x), repr(x)) if type(x) in (float, complex) else (type(x), x)


class Same:
    """A value as a key that is equal to the same object alone; kept alive."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)

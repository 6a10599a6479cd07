"""Refusals that are also errors of the class that torch, or the model, raises for the same mistake.

try: model.load_state_dict(state)
except RuntimeError: ...                 as in torch, though every refusal is a ValueError
"""

from __future__ import annotations

import functools
from typing import Any


class BothErrors(ValueError):
    """What `refusal_like` makes: its classes have another base, and the name of a ValueError."""

    def __str__(self) -> str:
        return ValueError.__str__(self)  # that of a KeyError quotes

    def __reduce__(self) -> tuple[Any, ...]:
        return ValueError, self.args  # other processes may lack the class


def is_refusal(error: BaseException) -> bool:
    """Whether an error tells of a user's mistake in words of autopar's."""
    return type(error) is ValueError or isinstance(error, BothErrors)


def refusal_like(error: BaseException, text: str) -> ValueError:
    """A ValueError with this text, which who catches the class of ``error`` catches, too, with its attributes. Classes
    within torch are none that users catch."""
    kind = type(error).__bases__[1] if isinstance(error, BothErrors) else type(error)
    if issubclass(ValueError, kind) or kind.__module__.startswith(("torch.", "autopar.")):
        return ValueError(text)
    both: type[ValueError] = _both(kind)
    try:
        made = BaseException.__new__(both, text)
    except TypeError:  # one that makes itself in a way of its own
        return ValueError(text)
    made.__dict__.update(error.__dict__)
    return made


@functools.lru_cache(64)
def _both(kind: Any) -> Any:
    try:
        return type("ValueError", (BothErrors, kind), {"__module__": "builtins"})
    except TypeError:  # such as OSError, which has fields of its own
        return ValueError

"""ValueErrors that are also instances of the class that torch, or the model, raises for the same mistake.

try: model.load_state_dict(state)
except RuntimeError: ...                 works as in torch; ``except ValueError`` catches it too
"""

from __future__ import annotations

import functools
from typing import Any


class BothErrors(ValueError):
    """Base of the classes that `refusal_like` creates; they are shown as ValueError."""

    def __str__(self) -> str:
        return ValueError.__str__(self)  # KeyError.__str__ would add quotes

    def __reduce__(self) -> tuple[Any, ...]:
        return ValueError, self.args  # another process may not have the class


def is_refusal(error: BaseException) -> bool:
    """Whether an error is autopar's own report of a user's mistake."""
    return type(error) is ValueError or isinstance(error, BothErrors)


def refusal_like(error: BaseException, text: str) -> ValueError:
    """A ValueError with this text that is also an instance of the class of ``error``, with its attributes, so that
    handlers for that class catch it. Internal classes of torch are left out: users do not catch them."""
    kind = type(error).__bases__[1] if isinstance(error, BothErrors) else type(error)
    if issubclass(ValueError, kind) or kind.__module__.startswith(("torch.", "autopar.")):
        return ValueError(text)
    both: type[ValueError] = _both(kind)
    try:
        made = BaseException.__new__(both, text)
    except TypeError:  # its __new__ takes other arguments
        return ValueError(text)
    made.__dict__.update(error.__dict__)
    return made


@functools.lru_cache(64)
def _both(kind: Any) -> Any:
    try:
        return type("ValueError", (BothErrors, kind), {"__module__": "builtins"})
    except TypeError:  # layouts conflict, as for OSError
        return ValueError

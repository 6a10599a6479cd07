"""What a capture has seen that it captures, but that may not be what was meant: a warning, and how to find out."""

from __future__ import annotations

import warnings

_HOW = "autopar.verify(model, mesh, batch) compares a step on the first batch with one process"


def warn_of(text: str, stacklevel: int = 1) -> None:
    """Warns at the line ``stacklevel`` calls above the caller's own."""
    warnings.warn(f"{text}; {_HOW}", stacklevel=stacklevel + 1)

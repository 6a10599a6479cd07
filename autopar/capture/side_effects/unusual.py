"""Warnings about captures that may not do what was intended, with a way to check."""

from __future__ import annotations

import warnings

_HOW = "autopar.verify(model, mesh, batch) compares a step on the first batch with one process"


def warn_of(text: str, stacklevel: int = 1) -> None:
    """Warn, at the line ``stacklevel`` calls above the caller."""
    warnings.warn(f"{text}; {_HOW}", stacklevel=stacklevel + 1)

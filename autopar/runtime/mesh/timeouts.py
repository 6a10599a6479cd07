"""How long a collective may take."""

from __future__ import annotations

import os
from datetime import timedelta

DEFAULT_TIMEOUT = 600.0  # seconds


def time_limit(timeout: float | timedelta | None) -> timedelta:
    """Of a collective: as given, else $AUTOPAR_TIMEOUT, else 600 seconds. Raises ValueError for what is no time."""
    given = os.environ.get("AUTOPAR_TIMEOUT", DEFAULT_TIMEOUT) if timeout is None else timeout
    name = "AUTOPAR_TIMEOUT" if timeout is None else "timeout"
    try:
        found = given if isinstance(given, timedelta) else timedelta(seconds=float(given))
    except (TypeError, ValueError, OverflowError):
        found = timedelta(0)
    if found <= timedelta(0) or isinstance(given, bool):
        raise ValueError(f"{name}: expected seconds above 0, found {given!r}; 600 is the default")
    return found

"""Value checks of `torch.distributions`, which cannot be captured."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch.distributions import Distribution

_lock = threading.Lock()
_captures: list[bool] = []  # of those under way, in several threads: what the first one found


@contextlib.contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Context manager: distributions do not validate their parameters. The checks branch on values, and only raise."""
    with _lock:
        _captures.append(_captures[0] if _captures else Distribution._validate_args)
        Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        with _lock:
            before = _captures.pop()
            if not _captures:
                Distribution._validate_args = before

"""Value checks of `torch.distributions`, which cannot be captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributions import Distribution


@contextlib.contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Context manager: distributions do not validate their parameters. The checks branch on values, and only raise."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution._validate_args = before

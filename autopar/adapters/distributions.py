"""What `torch.distributions` checks of values, by default: nothing that a graph could hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributions import Distribution


@contextlib.contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Within: parameters of distributions are not compared with their supports. Such checks branch on values, and all
    that they do is raise."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution._validate_args = before

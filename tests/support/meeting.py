"""Ranks that meet, for nothing but to be there."""

from __future__ import annotations

from datetime import timedelta

from autopar.runtime.consistency.rank_checks import all_alike
from autopar.runtime.mesh.process_groups import Groups


def meet_for(groups: Groups, what: str, timeout: float | None = None) -> None:
    """All ranks are here for ``what``, or it raises; ``timeout``: seconds that it waits for them."""
    if timeout is not None:
        groups.timeout = timedelta(seconds=timeout)
    assert all_alike(groups, what)

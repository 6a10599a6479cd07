"""Python's collector of cycles, which rests while a graph is made: nodes are many, live, and looked through again and
again, a third of the time to compile a large model. What is left over is collected afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def resting_collector() -> Iterator[None]:
    """Within: no collection starts by itself. Nests; one that somebody has switched off stays so."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

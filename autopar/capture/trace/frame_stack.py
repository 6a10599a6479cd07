"""Calls functions with a large chunk of Python's frame stack.

Python keeps frames in chunks of 16 KB. A call that needs a new chunk maps it, and unmaps it when it returns; a loop at
the end of a chunk does so in each iteration (measured: 150,000 times in 20 seconds of compiling; CPython 3.11). A frame
larger than a chunk gets a chunk of about twice its size, in which all calls below it find room.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
SLOTS = 70_000  # of 8 bytes: half a megabyte, of a chunk of one


def with_large_stack(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: call a function in a frame with a large chunk."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    code: types.CodeType = call.__code__  # type: ignore[attr-defined]
    call.__code__ = code.replace(co_stacksize=SLOTS)  # type: ignore[attr-defined]
    return call

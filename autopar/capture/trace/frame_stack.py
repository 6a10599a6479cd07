"""Calls with room on Python's stack of frames.

Python keeps frames in chunks of 16 KB. The call that is the first in a chunk maps it, and unmaps it when it returns;
a loop that happens to stand at the end of one does so in each turn (seen: 150,000 times in 20 seconds of compiling;
CPython 3.11). A frame that needs more than a chunk gets one of twice its size or nearly so, and all that is called
from there finds room in it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
SLOTS = 70_000  # of 8 bytes: half a megabyte, of a chunk of one


def roomy(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, whose calls have room."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    code: types.CodeType = call.__code__  # type: ignore[attr-defined]
    call.__code__ = code.replace(co_stacksize=SLOTS)  # type: ignore[attr-defined]
    return call

"""Requests of a process to the kernel, and how a process ends."""

from __future__ import annotations

import ctypes
import dis
import functools
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """On Linux: kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ProgramEnd:
    """How a program ends, for functions that run at its exit: Python does not tell them the exit code.

    A program has ended well if the script has returned, or has called ``sys.exit`` with 0 or None. Any other exception
    has left the script before its end: an error, or a SystemExit that the script itself raised, whose code is unknown.
    """

    def __init__(self) -> None:
        self._script, self._exit = _outermost_frame(), sys.exit
        self._last: Any = self  # what sys.exit was given last
        sys.exit = self._noted

    def _noted(self, status: Any = None, /) -> Any:
        self._last = status
        self._exit(status)

    @property
    def is_good(self) -> bool:
        """At exit: whether the exit code is 0, as far as is known."""
        if getattr(sys, "last_value", None) is not None:
            return False
        code = self._script.f_code.co_code[self._script.f_lasti]
        return dis.opname[code].startswith("RETURN_") or self._last in (None, 0)


def _outermost_frame() -> FrameType:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


program_end: Callable[[], ProgramEnd] = functools.cache(ProgramEnd)  # watched from the first call on

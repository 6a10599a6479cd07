"""Where in the model a node was made: the lines of forwards alone.

torch takes down the whole stack at every node, launchers and trainers included, looks up each line's text and then
keeps the frames of forwards: a tenth of the time to capture a model.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

from torch.fx import proxy


class _Forwards:
    """In the place of torch's CapturedTraceback: only frames that its tracer, which traces forwards, may keep."""

    def __init__(self, frame: FrameType | None) -> None:
        self._frame = frame

    @staticmethod
    def extract(**_: Any) -> _Forwards:
        return _Forwards(sys._getframe(1))

    def summary(self) -> traceback.StackSummary:
        found, frame, anchors = [], self._frame, proxy._STACK_TRACE_ANCHORS
        while frame is not None:
            code = frame.f_code
            file, name = code.co_filename, code.co_name
            if name == "forward" or file.endswith("torch/__init__.py") or (file, name) in anchors:
                found.append(traceback.FrameSummary(file, frame.f_lineno, name, lookup_line=False))
            frame = frame.f_back
        return traceback.StackSummary(reversed(found))


@contextmanager
def lines_of_forwards() -> Iterator[None]:
    """Within: the tracer of torch.export looks at frames of forwards alone, and writes the same lines."""
    with patch.object(proxy, "CapturedTraceback", _Forwards):
        yield

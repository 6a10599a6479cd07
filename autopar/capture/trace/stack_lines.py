"""Where in the model a node was made: the lines of forwards alone, from where the tracing began.

torch takes down the whole stack at every node, launchers and trainers included, looks up each line's text and then
keeps the frames of forwards: a tenth of the time to capture a model.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from unittest.mock import patch

from torch.fx import proxy


@dataclass(frozen=True)
class _Forwards:
    """In the place of torch's CapturedTraceback: only frames that its tracer, which traces forwards, may keep."""

    outermost: CodeType

    def extract(self, **_: object) -> _Lines:
        return _Lines(sys._getframe(1), self.outermost)


@dataclass(frozen=True)
class _Lines:
    frame: FrameType | None
    outermost: CodeType

    def summary(self) -> traceback.StackSummary:
        found, frame, anchors = [], self.frame, _anchors()
        while frame is not None and (code := frame.f_code) is not self.outermost:
            file, name = code.co_filename, code.co_name
            if name == "forward" or file.endswith("torch/__init__.py") or (file, name) in anchors:
                found.append(traceback.FrameSummary(file, frame.f_lineno, name, lookup_line=False))
            frame = frame.f_back
        return traceback.StackSummary(reversed(found))


def _anchors() -> set[tuple[str, str]]:
    """(file, function) of functions that are no forwards and whose lines torch keeps all the same. Before 2.13 there
    are none."""
    return getattr(proxy, "_STACK_TRACE_ANCHORS", set())


@contextmanager
def lines_of_forwards(outermost: CodeType) -> Iterator[None]:
    """Within: the tracer of torch.export looks at frames of forwards alone, and writes the same lines; but none of
    forwards that the function with this code runs in (a model's first call may be where it is captured)."""
    with patch.object(proxy, "CapturedTraceback", _Forwards(outermost)):
        yield

"""Stack traces of nodes that record only the frames of forwards, from where tracing began.

torch records the whole stack at every node, launchers and trainers included, with the text of each line, and then keeps
only frames of forwards. That takes a tenth of the time to capture a model.
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
    """Replaces torch's CapturedTraceback: only frames of forwards, which the tracer keeps."""

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
    """(file, function) of other functions whose lines torch keeps. There are none before 2.13."""
    return getattr(proxy, "_STACK_TRACE_ANCHORS", set())


@contextmanager
def lines_of_forwards(outermost: CodeType) -> Iterator[None]:
    """Context manager: torch.export records only frames of forwards, and only inside of the function with the code
    ``outermost``, since the capture itself may run within a forward."""
    with patch.object(proxy, "CapturedTraceback", _Forwards(outermost)):
        yield

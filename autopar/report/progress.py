"""Progress of the compiler, shown by the first rank.

on a terminal     one line that is updated, after a second
without one       a line every 30 seconds: autopar: compiling Llama: 60 s, after place_conversions
at the end        if it took that long, the longest phases: 75 s: capture 40 s, differentiate 20 s, all else 15 s
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping

from rich.console import Console
from rich.status import Status
from torch.fx import GraphModule

from autopar.rewrite.compilation import Compilation

PATIENCE = 1.0  # seconds before the line of a terminal appears
EVERY = 30.0  # seconds between the lines elsewhere; a compilation that takes as long ends with its longest phases
_MOST_PHASES = 5


class Progress:
    """An observer. Only the first rank needs it: all ranks compile the same graphs."""

    glances = True

    def __init__(self, title: str, every: float = EVERY) -> None:
        self.title, self.start, self._every = title, time.perf_counter(), every
        self.status: Status | None = None
        self.shown = sys.stderr.isatty()
        self._last, self._timings = "the start", dict[str, float]()
        self._over = threading.Event()
        self._teller: threading.Thread | None = None

    def begin(self) -> Progress:
        """Start printing a line from time to time. `close` ends it."""
        if not self.shown:
            self._teller = threading.Thread(target=self._tell, daemon=True)
            self._teller.start()
        return self

    def _elapsed(self) -> float:
        return time.perf_counter() - self.start

    def __call__(self, name: str, gm: GraphModule, ctx: Compilation) -> None:
        self._last, self._timings = name, ctx.timings
        if not self.shown or self._elapsed() < PATIENCE:
            return
        text = f"{self.title}: {name} done, {len(gm.graph.nodes)} nodes, {self._elapsed():.1f} s"
        if self.status is None:
            self.status = Console(stderr=True).status(text)
            self.status.start()
        self.status.update(text)

    def _tell(self) -> None:
        while not self._over.wait(self._every):
            _say(f"{self.title}: {self._elapsed():.0f} s, after {self._last}")

    def close(self) -> None:
        """Remove the line; after a long compilation, print how long its phases took."""
        self._over.set()
        if self._teller is not None:
            self._teller.join()  # so that nothing is printed after the last line
        if self.status is not None:
            self.status.stop()
        if self._elapsed() >= self._every and self._timings:
            _say(f"{self.title} took {_phases(self._elapsed(), self._timings)}")


def _say(text: str) -> None:
    print(f"autopar: {text}", file=sys.stderr, flush=True)


def _phases(total: float, timings: Mapping[str, float]) -> str:
    longest = sorted(timings.items(), key=lambda pair: -pair[1])[:_MOST_PHASES]
    rest = max(0.0, total - sum(seconds for _, seconds in longest))
    return f"{total:.0f} s: " + ", ".join(f"{name} {s:.1f} s" for name, s in [*longest, ("all else", rest)])

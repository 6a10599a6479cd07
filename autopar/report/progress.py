"""What the compiler is doing, for whoever waits: one line on a terminal, from the first rank."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.status import Status
from torch.fx import GraphModule

from autopar.rewrite.compilation import Compilation

PATIENCE = 1.0  # seconds before the line appears


class Progress:
    """An observer that shows the last finished level and the time so far, once compiling takes over a second. It
    does not need all of them: the first rank compiles as the others do."""

    glances = True

    def __init__(self, title: str) -> None:
        self.title, self.start = title, time.perf_counter()
        self.status: Status | None = None
        self.shown = sys.stderr.isatty()

    def __call__(self, name: str, gm: GraphModule, ctx: Compilation) -> None:
        elapsed = time.perf_counter() - self.start
        if not self.shown or elapsed < PATIENCE:
            return
        text = f"{self.title}: {name} done, {len(gm.graph.nodes)} nodes, {elapsed:.1f} s"
        if self.status is None:
            self.status = Console(stderr=True).status(text)
            self.status.start()
        self.status.update(text)

    def close(self) -> None:
        """Take the line away."""
        if self.status is not None:
            self.status.stop()

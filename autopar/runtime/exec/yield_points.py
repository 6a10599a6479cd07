"""Step graphs that pause: where they would wait for an exchange of tokens, so that another one may compute meanwhile.

    rows = start_all_to_all_rows(x, splits)       rows = start_all_to_all_rows(x, splits)
    rows_1 = finish(rows); y = mm(rows_1, w)  --> yield
                                                  rows_1 = finish(rows); y = mm(rows_1, w)

The code is a generator then. Which exchanges: `autopar.ir.waits.pauses_at`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Any

from torch.fx import Graph

Steps = Generator[None, None, Any]  # returns what the graph returns
_MARK = re.compile(r"^\s*\w+ = \w*pause_here\(\);?.*$", re.MULTILINE)


def pause_here() -> None:
    """Stands in a lowered graph where its code pauses."""


def pauses_in(graph: Graph) -> int:
    """How often the code of a lowered graph pauses."""
    return sum(node.op == "call_function" and node.target is pause_here for node in graph.nodes)


def make_generator(graph: Graph) -> None:
    """The code of a lowered graph yields where it is marked."""
    graph.on_generate_code(lambda _: lambda lines: [_MARK.sub("yield", line) for line in lines])


def drained(steps: Callable[[list[Any]], Steps]) -> Callable[[list[Any]], Any]:
    """Runs through."""

    def run(inputs: list[Any]) -> Any:
        going = steps(inputs)
        try:
            while True:
                next(going)
        except StopIteration as end:
            return end.value

    return run

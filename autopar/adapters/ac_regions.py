"""Regions of `torch.utils.checkpoint`, recorded in ``meta["ac_region"]`` of the nodes of a capture.

    y = checkpoint(block, x)        the nodes that block(x) adds to the graph

Both kinds (reentrant or not) simply call their function while a graph is captured: no RNG state is saved and no hook is
set. The compiler decides how to recompute.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.utils.checkpoint
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_NUMBERS = itertools.count(1)


@contextlib.contextmanager
def noted_regions() -> Iterator[None]:
    """Context manager: record non-reentrant checkpoints. (`autograd_function` handles the others.)"""
    module: Any = torch.utils.checkpoint
    name = _name_of_generator()
    original = getattr(module, name)
    setattr(module, name, _generator)
    try:
        yield
    finally:
        setattr(module, name, original)


def _name_of_generator() -> str:
    """The name of the generator that `checkpoint` runs around its function. Since 2.14 the older name is a wrapper."""
    names = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    return next(name for name in names if hasattr(torch.utils.checkpoint, name))


def next_region() -> int:
    """The number of the next checkpoint region."""
    return next(_NUMBERS) + 1  # +1: this call takes one


def new_regions() -> dict[int, int]:
    """Number of a region -> number of its copy, in a copied layer."""
    return defaultdict(lambda: next(_NUMBERS))


def decomposed(program: ExportedProgram, table: Mapping[Any, Callable[..., Any]]) -> ExportedProgram:
    """`run_decompositions` that keeps the region of nodes, by way of "custom" metadata, which it propagates."""
    root = program.graph_module
    regions = {name: m for name, m in root.named_children() if isinstance(m, GraphModule)}
    for node in root.graph.nodes:  # a grad-mode region belongs to the checkpoint of its nodes
        inner = [regions[x.target] for x in node.all_input_nodes if x.op == "get_attr" and x.target in regions]
        region = node.meta.get("ac_region") or next(
            (n.meta["ac_region"] for gm in inner for n in gm.graph.nodes if "ac_region" in n.meta), 0
        )
        if region:
            node.meta["custom"] = {**node.meta.get("custom", {}), "ac_region": region}
    flat = program.run_decompositions(dict(table))
    for node in flat.graph.nodes:
        if "ac_region" in (custom := node.meta.get("custom", {})):
            node.meta["ac_region"] = custom["ac_region"]
    return flat


def _generator(*args: Any, **kwargs: Any) -> Iterator[None]:
    with asked_for():
        yield


@contextlib.contextmanager
def asked_for() -> Iterator[None]:
    """Context manager: record new nodes as one checkpoint region."""
    graph, number = _graph(), next(_NUMBERS)
    before = set(graph.nodes) if graph is not None else set()
    yield
    for node in graph.nodes if graph is not None else ():
        if node not in before:
            node.meta["ac_region"] = number


def _graph() -> Graph | None:
    mode: Any = get_proxy_mode()
    return mode.tracer.graph if mode is not None else None

"""What a model calls within `torch.utils.checkpoint` is noted on the nodes of the capture: `asked`.

    y = checkpoint(block, x)        the nodes that block(x) adds to the graph

Both kinds (reentrant or not) call their function as it is while a graph is captured: no generator is saved and no hook
is set, and how values are made again is up to the compiler.
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
    """Within: checkpoints that are not reentrant are noted. (`autograd_function` has the others.)"""
    module: Any = torch.utils.checkpoint
    name = _name_of_generator()
    original = getattr(module, name)
    setattr(module, name, _generator)
    try:
        yield
    finally:
        setattr(module, name, original)


def _name_of_generator() -> str:
    """What torch's `checkpoint` makes around its function. Since 2.14 the name of before only leads to another."""
    names = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    return next(name for name in names if hasattr(torch.utils.checkpoint, name))


def next_region() -> int:
    """The number of the checkpoint that begins next."""
    return next(_NUMBERS) + 1  # which takes one


def new_regions() -> dict[int, int]:
    """Number of a checkpoint -> that of the same one in a copy of what called it."""
    return defaultdict(lambda: next(_NUMBERS))


def decomposed(program: ExportedProgram, table: Mapping[Any, Callable[..., Any]]) -> ExportedProgram:
    """`run_decompositions`, whose nodes are noted as those that they are made of: it hands on what is "custom"."""
    root = program.graph_module
    regions = {name: m for name, m in root.named_children() if isinstance(m, GraphModule)}
    for node in root.graph.nodes:  # what is within a region is noted as the region is
        inner = [regions[x.target] for x in node.all_input_nodes if x.op == "get_attr" and x.target in regions]
        asked = node.meta.get("asked") or next(
            (n.meta["asked"] for gm in inner for n in gm.graph.nodes if "asked" in n.meta), 0
        )
        if asked:
            node.meta["custom"] = {**node.meta.get("custom", {}), "asked": asked}
    flat = program.run_decompositions(dict(table))
    for node in flat.graph.nodes:
        if "asked" in (custom := node.meta.get("custom", {})):
            node.meta["asked"] = custom["asked"]
    return flat


def _generator(*args: Any, **kwargs: Any) -> Iterator[None]:
    with asked_for():
        yield


@contextlib.contextmanager
def asked_for() -> Iterator[None]:
    """The nodes that are made within are noted as those of one checkpoint, by a number of its own."""
    graph, number = _graph(), next(_NUMBERS)
    before = set(graph.nodes) if graph is not None else set()
    yield
    for node in graph.nodes if graph is not None else ():
        if node not in before:
            node.meta["asked"] = number


def _graph() -> Graph | None:
    mode: Any = get_proxy_mode()
    return mode.tracer.graph if mode is not None else None

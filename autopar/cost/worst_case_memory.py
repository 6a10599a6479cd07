"""Memory if routing sends a rank as many tokens as it can: the walk of `autopar.cost.memory`, over graphs whose values
have the rows that `most_rows` has noted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.fx import Node

from autopar.cost.memory import Memory, memory
from autopar.steps.graphs import Compiled
from autopar.steps.of_rank import graphs_of_all


def memory_at_worst(compiled: Compiled) -> Memory | None:
    """Of the rank that needs most; an upper bound, for no routing sends most everywhere. None where no experts are
    cut."""
    nodes = {n for gm in graphs_of_all(compiled.pipeline, compiled.prologue) for n in gm.graph.nodes}
    routed = [n for n in nodes if "most_rows" in n.meta]
    if not routed:
        return None
    with _with_most(routed):
        return memory(compiled)


@contextmanager
def _with_most(nodes: list[Node]) -> Iterator[None]:
    """Within: values have as many rows as they may have."""
    before = [node.meta["val"] for node in nodes]
    try:
        for node, val in zip(nodes, before, strict=True):
            several = isinstance(val, (tuple, list))
            found = [_of_rows(x, n) for x, n in zip(val if several else [val], node.meta["most_rows"], strict=True)]
            node.meta["val"] = type(val)(found) if several else found[0]
        yield
    finally:
        for node, val in zip(nodes, before, strict=True):
            node.meta["val"] = val


def _of_rows(x: object, rows: int | None) -> object:
    return x if rows is None or not isinstance(x, torch.Tensor) else x.new_empty((rows, *x.shape[1:]))

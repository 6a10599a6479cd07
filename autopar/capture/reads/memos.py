"""Memos: values that a forward caches for the next one, described as text. A tensor is described by its operators.

    if self.table is None:
        self.table = torch.full((3,), GAIN)         ones.default([3]) and so on, with the number that GAIN was

A step that is captured later computes the memo again, where torch uses that of the first forward. If the texts are
equal, the values are.
"""

from __future__ import annotations

import types
from collections import deque
from typing import Any

import numpy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_arg

from autopar.adapters.fx.graph_nodes import node_of
from autopar.capture.reads.code_owners import USER, owner_of_module

_NUMBERS = (bool, int, float, complex, str)
_DATA = {*_NUMBERS, bytes, type(None)}
_CONTAINERS = (dict, list, set, deque, tuple, frozenset)
_MOST = 200  # operators


def memo_text(x: Any) -> str | None:
    """The text of a memo; None if it cannot be compared, or depends on inputs or parameters."""
    if type(x) in _NUMBERS:
        return repr(x)
    mode: Any = get_proxy_mode()
    if not isinstance(x, FakeTensor) or mode is None:
        return None
    node = node_of(x, mode.tracer)
    return None if node is None else _made_by(node, mode.tracer.root)


def _made_by(node: Node, root: Any) -> str | None:
    """The operators that a node depends on, in graph order; None if one depends on an input."""
    behind, queue = {node}, [node]
    while queue:
        new = [y for y in queue.pop().all_input_nodes if y not in behind]
        behind.update(new)
        queue += new
        if len(behind) > _MOST:
            return None
    lines: dict[Node, str] = {}
    for x in (x for x in node.graph.nodes if x in behind):
        if x.op == "get_attr":
            value = getattr(root, str(x.target), None)
            text = str(value.tolist()) if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else "0x"
        else:
            number = {y: f"%{i}" for i, y in enumerate(lines)}
            text = f"{x.target}{map_arg((x.args, x.kwargs), number.__getitem__)}"
        if x.op == "placeholder" or "0x" in text:  # an input, or the address of an object
            return None
        lines[x] = text
    return "; ".join(lines.values())


def is_data(x: Any, depth: int = 4) -> bool:
    """Whether a value consists of numbers and strings alone, so that computing it again has no side effect."""
    if type(x) in _DATA or isinstance(x, (numpy.generic, numpy.ndarray)):
        return True
    if isinstance(x, _CONTAINERS):
        entries = (*x, *x.values()) if isinstance(x, dict) else tuple(x)
        return depth > 0 and all(is_data(y, depth - 1) for y in entries)
    own = isinstance(x, types.SimpleNamespace) or owner_of_module(type(x).__module__) == USER
    return own and not callable(x) and hasattr(x, "__dict__") and is_data(vars(x), depth - 1)

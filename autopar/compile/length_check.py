"""Whether a forward computes the same for sequences of any length, up to sizes: requests of all lengths share a graph.

Rotary embeddings that scale with the length of a sequence, branches on it, and factors computed from it do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autopar.ir.graph import describe
from autopar.ir.meta import input_specs


def depends_on_length(long: GraphModule, short: GraphModule) -> str:
    """Where two captures of one model, for sequences of two lengths, differ in more than sizes; "" if nowhere."""
    ones, others = (list(gm.graph.nodes) for gm in (long, short))
    specs = [input_specs(gm) for gm in (long, short)]
    for a, b in zip(ones, others):
        if a.op != b.op or (a.op == "placeholder" and specs[0][a.name].name != specs[1][b.name].name):
            return describe(a)
        if a.op == "call_function" and (a.target != b.target or not _alike((a.args, a.kwargs), (b.args, b.kwargs))):
            return describe(a)
    if len(ones) != len(others):
        return describe(max(ones, others, key=len)[min(len(ones), len(others)) - 1])
    return _other_constant(*(gm.meta.get("constants", {}) for gm in (long, short)))


def _alike(a: Any, b: Any) -> bool:
    """Whether arguments are equal, up to whole numbers, which may be sizes."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, Node) or isinstance(b, Node):
        return isinstance(a, Node) and isinstance(b, Node)
    numbers = all(isinstance(x, int) and not isinstance(x, bool) for x in (a, b))
    return numbers or (type(a) is type(b) and bool(a == b or a != a))


def _other_constant(long: Mapping[str, Tensor], short: Mapping[str, Tensor]) -> str:
    for name, x in long.items():
        y = short.get(name)
        if y is None or x.dim() != y.dim():
            return f"constant {name}"
        common = tuple(slice(0, min(m, n)) for m, n in zip(x.shape, y.shape))
        if not (x.is_meta or y.is_meta or torch.equal(x[common], y[common])):
            return f"constant {name}"
    return ""

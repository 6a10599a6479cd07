"""Dtypes that the default dtype decides, written into the training graph of torch.export.

    zeros([4])              -->   zeros([4], dtype=float32)
    arange(8) * 0.5         -->   _to_copy(arange(8), dtype=float64) * 0.5
    where(c, 0.1, 0.2)      -->   where(c, full([], 0.1, dtype=float64), full([], 0.2, dtype=float64))

torch.export omits the dtype of a factory where it equals the current default. And a forward that is lifted to float64
has another default than the runs of its graph, in which integers would become floats of float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

_BETWEEN_TENSORS = (torch.ops.aten.linspace, torch.ops.aten.logspace)  # the ends do not decide the dtype
_WHERE = {getattr(torch.ops.aten.where, name) for name in ("Scalar", "ScalarSelf", "ScalarOther")}


def write_dtype(node: Node) -> None:
    """Of a factory."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.kwargs.get("dtype") is not None:
        return
    names = [a.name for a in node.target._schema.arguments]
    takes_tensor = any(isinstance(a, Node) for a in node.args) and node.target.overloadpacket not in _BETWEEN_TENSORS
    if "dtype" in names[len(node.args) :] and "device" in names and not takes_tensor:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            node.kwargs = {**node.kwargs, "dtype": value.dtype}


def cast_integers(node: Node) -> None:
    """Of a call that makes floats of integers, where their dtype is not the default outside of the forward."""
    dtype = getattr(node.meta.get("val"), "dtype", torch.int64)
    operands = [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), Tensor)]
    given = any(isinstance(x, torch.dtype) for x in (*node.args, *node.kwargs.values()))
    if _is_exact(dtype) or given or not all(_is_exact(x.meta["val"].dtype) for x in operands):
        return
    args: list[Any] = list(node.args)
    real, picks = dtype.to_real(), node.target in _WHERE
    if not operands or real == torch.get_default_dtype():
        return
    for place, x in enumerate(args):
        if x in operands and not (picks and place == 0):  # not the condition
            args[place] = _called(node, torch.ops.aten._to_copy.default, (x,), x.meta["val"].to(real))
        elif picks and not isinstance(x, Node):
            args[place] = _called(
                node, torch.ops.aten.full.default, ([], x), node.meta["val"].new_empty((), dtype=real)
            )
    node.target = torch.ops.aten.where.self if picks else node.target
    node.args = tuple(args)


def _called(node: Node, target: Any, args: tuple[Any, ...], value: Tensor) -> Node:
    """A call in front of a node, of the same line; ``value``: its fake result."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args, {"dtype": value.dtype, "device": value.device})
    made.meta = {**node.meta, "val": value}
    return made


def _is_exact(dtype: torch.dtype) -> bool:
    """Integers and booleans."""
    return not (dtype.is_floating_point or dtype.is_complex)

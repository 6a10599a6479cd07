"""Operands that torch's kernels refuse and its shape functions accept: said at capture, before all else is compiled.

linear(x: float32, weight: float64)   ->   ValueError that names x, the line and the cast
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autopar.capture.trace.export import line_of
from autopar.ops.traits import PRODUCTS

aten = torch.ops.aten

# All floating operands have one dtype.
ONE_DTYPE = PRODUCTS - {torch.ops.autopar.grouped_mm.default} | {aten.complex.default, aten.polar.default}
# So have these, but that half precision may meet float32 weights.
NORMS = {aten.layer_norm.default, aten.group_norm.default}
HALVES = (torch.bfloat16, torch.float16)


# Losses of classes, whose labels are int64 or uint8; floating targets are probabilities.
LABELLED = {aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default}
LABELS = (torch.int64, torch.uint8)


def check_dtypes(graph: Graph, names: Mapping[str, str]) -> None:
    """Raises ValueError for a product or norm of operands with several dtypes, and for labels of a dtype that torch's
    losses refuse. ``names``: of placeholders, as the user
    knows them."""
    for node in graph.nodes:
        if node.target in ONE_DTYPE or node.target in NORMS:
            operands = [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), Tensor)]
            dtypes = {x.meta["val"].dtype for x in operands}
            mixed = node.target in NORMS and dtypes in [{half, torch.float32} for half in HALVES]
            if len(dtypes) > 1 and not mixed:
                raise ValueError(_differ(node, operands, names))
        elif node.target in LABELLED:
            _check_labels(node, names)


def _check_labels(node: Node, names: Mapping[str, str]) -> None:
    labels = node.args[1]
    assert isinstance(labels, Node)
    dtype = labels.meta["val"].dtype
    if not dtype.is_floating_point and dtype not in LABELS:
        raise ValueError(
            f"capture: {line_of(node)}: needs labels of int64, found {_origin(labels, names)} {_word(dtype)}; pass "
            "labels.long()"
        )


def _differ(node: Node, operands: list[Node], names: Mapping[str, str]) -> str:
    found = " and ".join(f"{_origin(x, names)} {_word(x.meta['val'].dtype)}" for x in operands)
    return (
        f"capture: {line_of(node)}: needs operands of one dtype, found {found}; give the input the dtype of the "
        "weights, or cast in the forward"
    )


def _origin(node: Node, names: Mapping[str, str]) -> str:
    """The name of the input or parameter that a value of this dtype comes from, or its own."""
    dtype, start = node.meta["val"].dtype, node
    while node.name not in names:
        same = [x for x in node.all_input_nodes if getattr(x.meta.get("val"), "dtype", None) == dtype]
        if not same:
            return start.name
        node = same[0]
    return names[node.name]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

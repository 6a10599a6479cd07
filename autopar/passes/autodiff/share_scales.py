"""share_scales: a value that several products take is scaled and rounded once.

Consumes    a joint graph.
Guarantees  no two equal calls find the magnitude of a value, agree on it, make a scale, or round by it.
Leaves      products; every number.

    a = quantized(x, scale_of(largest(x)));  y = scaled_mm(a, q)        a = quantized(x, scale_of(largest(x)))
    b = quantized(x, scale_of(largest(x)));  z = scaled_mm(b, k)   -->  y = scaled_mm(a, q);  z = scaled_mm(a, k)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import arguments, frozen, is_call, reach
from autopar.ops.traits import is_view

ours = torch.ops.autopar
SCALING = (
    ours.largest.default, ours.scale_of.default, ours.delayed_scale.default, ours.quantized.default,
    ours.largest_by_group.default, ours.quantized_by_group.default,
)  # fmt: skip


def share_scales(gm: GraphModule) -> None:
    """See the module's docstring."""
    scaled = [n for n in gm.graph.nodes if is_call(n, *SCALING)]
    asked = set(scaled) | {x for n in scaled for x in reach(n.all_input_nodes, _through_views) if is_view(x.target)}
    seen: dict[Any, Node] = {}
    for node in list(gm.graph.nodes):
        if node in asked or _agrees(node):
            first = seen.setdefault((node.target, *(frozen(x, lambda x: x) for x in (node.args, node.kwargs))), node)
            if first is not node:
                node.replace_all_uses_with(first)
                gm.graph.erase_node(node)


def _through_views(node: Node) -> list[Node]:
    return node.all_input_nodes if is_view(node.target) else []


def _agrees(node: Node) -> bool:
    """Whether ranks agree on a magnitude."""
    if not is_call(node, ours.all_reduce.default) or arguments(node)["op"] != "max":
        return False
    x = node.args[0]
    return isinstance(x, Node) and (is_call(x, ours.largest.default, ours.largest_by_group.default) or _agrees(x))

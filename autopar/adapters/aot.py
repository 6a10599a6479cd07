"""The one place that talks to AOTAutograd: a local graph becomes the joint graph of its forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.fx import GraphModule, Interpreter, Node

PROVENANCE = ("nn_module_stack", "stack_trace")


class _Tagging(Interpreter):
    """Runs a graph so that traced nodes carry the metadata of the node they come from."""

    def run_node(self, n: Node) -> Any:
        with torch.fx.traceback.set_current_meta(n):
            return super().run_node(n)


def joint_graph(gm: GraphModule, differentiable: Sequence[bool]) -> GraphModule:
    """Forward and backward of a flat functional graph as one graph of core operators.

    Args:
        gm: a graph of placeholders with fake values in ``meta["val"]`` and a flat tuple as output.
        differentiable: per placeholder, whether its gradient is wanted.

    Returns: a graph with the placeholders of ``gm``, then one tangent per output that has a gradient; it returns the
    outputs of ``gm``, then one gradient (or None) per placeholder. Without any gradient wanted: the forward alone.
    """
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    args = []
    for node, wanted in zip(nodes, differentiable, strict=True):
        args.append(node.meta["val"].detach().requires_grad_(wanted))

    def function(*inputs: torch.Tensor) -> Any:
        with torch.fx.traceback.preserve_node_meta():
            return _Tagging(gm).run(*inputs)

    traced = aot_export_joint_simple(function, tuple(args), trace_joint=any(differentiable))
    assert isinstance(traced, GraphModule)
    return traced

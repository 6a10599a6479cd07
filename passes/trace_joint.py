"""trace_joint: a local graph becomes the joint graph of its forward and backward.

Consumes a local graph; guarantees that every traced node carries the metadata of the node that it comes from, and that
a model's own backwards (`autopar.ops.gradient`) run where autograd asks for them; leaves alone what is differentiated.

y = f(x)        -->        y = f(x); gx = f_backward(gy, x)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from autopar.adapters.aot import traced_joint
from autopar.ir.own_backward import OwnBackward, inside_of, own_backwards
from autopar.ops.checked import CHECKED
from autopar.ops.gradient import OWN_BACKWARD, RESULT


class _Tagging(Interpreter):
    """Runs a graph so that traced nodes carry the metadata of the node they come from; a model's own backwards run
    where autograd asks for them."""

    def __init__(self, gm: GraphModule) -> None:
        own = own_backwards(gm.graph)
        super().__init__(gm, garbage_collect_values=not own)  # what a backward takes is kept until its token
        self.own = {one.token: one for one in own}
        self.inside = inside_of(gm.graph)

    def run_node(self, n: Node) -> Any:
        if n in self.inside:
            return None
        with torch.fx.traceback.set_current_meta(n):
            if n.target is OWN_BACKWARD:
                return self._own_backward(self.own[n])
            if n.target is RESULT:
                return self._result(n)
            return super().run_node(n)

    def _own_backward(self, own: OwnBackward) -> dict[Node, Tensor]:
        """Sources of the results' gradients, by hole."""
        inputs, saved = [self.env[x] for x in own.inputs], [self.env[x].detach() for x in own.saved]
        shapes = [hole.meta["val"] for hole in own.holes]
        sources = _DeferredBackward.apply(own, shapes, len(inputs), *inputs, *saved)
        return dict(zip(own.holes, sources, strict=True))

    def _result(self, n: Node) -> Tensor:
        value, hole, token = n.all_input_nodes
        made: Tensor = torch.ops.autopar.with_gradient_of(self.env[value], self.env[token][hole])
        return made


class _DeferredBackward(torch.autograd.Function):
    """Gives tensors without values; of their gradients it computes those of its inputs, by a part of a graph."""

    @staticmethod
    def forward(ctx: Any, own: OwnBackward, like: Sequence[Tensor], count: int, *tensors: Tensor) -> Any:
        ctx.own, ctx.like = own, like
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[count:])
        return tuple(tensors[0].new_empty(x.shape, dtype=x.dtype) for x in like)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        own: OwnBackward = ctx.own
        if not own.zeros and any(g is None for g in grads):
            raise ValueError(
                f"the autograd function {own.name} asks for None instead of gradients of zeros (set_materialize_grads) "
                "and one of its results has no gradient here; let its backward take zeros"
            )
        grads = tuple(_zeros(x) if g is None else g for g, x in zip(grads, ctx.like, strict=True))
        known: dict[Node, Any] = dict(zip(own.holes, grads, strict=True))
        known |= zip(own.saved, ctx.saved_tensors, strict=True)
        for node in own.inside:
            with torch.fx.traceback.set_current_meta(node):
                args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return None, None, None, *(known[g] for g in own.gradients), *(None for _ in own.saved)


def _zeros(like: Tensor) -> Tensor:
    """Made anew: ``like`` is no tensor of the trace."""
    return torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device)


def joint_graph(gm: GraphModule, differentiable: Sequence[bool]) -> GraphModule:
    """Forward and backward of a flat functional graph as one graph of core operators.

    Args:
        gm: a graph of placeholders with fake values in ``meta["val"]`` and a flat tuple as output.
        differentiable: per placeholder, whether its gradient is wanted.

    Returns: a graph with the placeholders of ``gm``, then one tangent per output that has a gradient; it returns the
    outputs of ``gm``, then one gradient (or None) per placeholder. Without any gradient wanted: the forward alone.
    """
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    inputs = [n.meta["val"].detach().requires_grad_(wanted) for n, wanted in zip(nodes, differentiable, strict=True)]
    return traced_joint(lambda *args: _Tagging(gm).run(*args), inputs, CHECKED)

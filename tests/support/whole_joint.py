"""The joint graph as AOTAutograd traces it whole: what `autopar.passes.autodiff.trace_joint` must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from autopar.capture.trace.aot import traced_joint
from autopar.ir.custom_backward import CustomBackward, inside_of, own_backwards
from autopar.ops.gradient import OWN_BACKWARD, RESULT
from autopar.ops.value_checks import CHECKED


class OwnBackwards(Interpreter):
    """Runs a graph, with a model's own backwards where autograd asks for them."""

    def __init__(self, gm: GraphModule) -> None:
        own = own_backwards(gm.graph)
        super().__init__(gm, garbage_collect_values=not own)  # what a backward takes is kept until its token
        self.own = {one.token: one for one in own}
        self.inside = inside_of(gm.graph)

    def run_node(self, n: Node) -> Any:
        if n in self.inside:
            return None
        if n.target is OWN_BACKWARD:
            return self._own_backward(self.own[n])
        return self._result(n) if n.target is RESULT else super().run_node(n)

    def _own_backward(self, own: CustomBackward) -> dict[Node, Tensor]:
        """Sources of the results' gradients, by grad_output."""
        inputs, saved = [self.env[x] for x in own.inputs], [self.env[x].detach() for x in own.saved]
        shapes = [grad_output.meta["val"] for grad_output in own.grad_outputs]
        sources = _DeferredBackward.apply(own, shapes, len(inputs), *inputs, *saved)
        return dict(zip(own.grad_outputs, sources, strict=True))

    def _result(self, n: Node) -> Tensor:
        value, grad_output, token = n.all_input_nodes
        made: Tensor = _GradientOf.apply(self.env[value], self.env[token][grad_output])  # type: ignore[no-untyped-call]
        return made


class _GradientOf(torch.autograd.Function):
    """The value, whose gradient goes to the source alone."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, source: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, grad


class _DeferredBackward(torch.autograd.Function):
    """Gives tensors without values; of their gradients it computes those of its inputs, by a part of a graph."""

    @staticmethod
    def forward(ctx: Any, own: CustomBackward, like: Sequence[Tensor], count: int, *tensors: Tensor) -> Any:
        ctx.own, ctx.like = own, like
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[count:])
        return tuple(tensors[0].new_empty(x.shape, dtype=x.dtype) for x in like)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        own: CustomBackward = ctx.own
        if not own.zeros and any(g is None for g in grads):
            raise ValueError(
                f"the autograd function {own.name} asks for None instead of gradients of zeros (set_materialize_grads) "
                "and one of its results has no gradient here; let its backward take zeros"
            )
        grads = tuple(_zeros(x) if g is None else g for g, x in zip(grads, ctx.like, strict=True))
        known: dict[Node, Any] = dict(zip(own.grad_outputs, grads, strict=True))
        known |= zip(own.saved, ctx.saved_tensors, strict=True)
        for node in own.inside:
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return None, None, None, *(known[g] for g in own.gradients), *(None for _ in own.saved)


def _zeros(like: Tensor) -> Tensor:
    """Made anew: ``like`` is no tensor of the trace."""
    return torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device)


def whole_joint(gm: GraphModule, differentiable: Sequence[bool]) -> GraphModule:
    """As `joint_graph`."""
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    inputs = [n.meta["val"].detach().requires_grad_(wanted) for n, wanted in zip(nodes, differentiable, strict=True)]
    return traced_joint(lambda *args: OwnBackwards(gm).run(*args), inputs, CHECKED)

"""Reverse mode: gradients flow through a local graph from the last operator to the first.

The order is autograd's; gradients of one value are added as they arrive. `Backward` runs twice over a graph: once for
the shapes of the gradients, which determine how each derivative decomposes, and once for the nodes (`trace_joint`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.fx import GraphModule, Node

from autopar.capture.trace.op_decomposition import Recorded, TensorMeta, Value
from autopar.ir.custom_backward import CustomBackward, inside_of, own_backwards
from autopar.ir.graph import is_call, placeholders
from autopar.ops.gradient import RESULT
from autopar.passes.autodiff.vjp import derivative, marked

aten = torch.ops.aten

T = TypeVar("T")
ResultKey = tuple[Node, int]  # a call, and the index of its result


def is_entry(node: Node) -> bool:
    """Whether a node takes a tensor out of the results of a call."""
    return is_call(node, operator.getitem) and isinstance(node.args[0], Node)


def result_key(node: Node) -> ResultKey:
    """The call and the index that a node, or an entry of a tuple, is the result of."""
    return (node.args[0], node.args[1]) if is_entry(node) else (node, 0)  # type: ignore[return-value]


def parts_of_result(node: Node) -> tuple[Node, Node, Node]:
    """(value, grad_output, token) of a result of the model's autograd function."""
    value, grad_output, token = node.args
    return value, grad_output, token  # type: ignore[return-value]


def forward_calls(gm: GraphModule) -> list[Node]:
    """The calls of a local graph that run before any gradient exists, in order."""
    inside = inside_of(gm.graph)
    return [n for n in gm.graph.nodes if n.op == "call_function" and n not in inside and not is_entry(n)]


class ForwardValues:
    """The metadata of every value of a local graph, and whether a gradient flows into it."""

    def __init__(self, gm: GraphModule, differentiable: Sequence[bool]) -> None:
        self.graph, self.inputs = gm.graph, placeholders(gm)
        self.own = {one.token: one for one in own_backwards(gm.graph)}
        self.likes: dict[ResultKey, TensorMeta] = {}
        self.needs: dict[ResultKey, bool] = {}
        self.found: dict[Node, Recorded] = {}
        self.calls = forward_calls(gm)
        for node, wanted in zip(self.inputs, differentiable, strict=True):
            self.likes[node, 0], self.needs[node, 0] = TensorMeta.of(node.meta["val"]), wanted
        for node in self.calls:
            self._add(node)

    def _add(self, node: Node) -> None:
        if node in self.own:
            self.needs[node, 0] = any(self.needs[result_key(x)] for x in self.own[node].inputs)
        elif is_call(node, RESULT):
            value, _, token = parts_of_result(node)
            self.likes[node, 0], self.needs[node, 0] = self.likes[result_key(value)], self.needs[token, 0]
        else:
            found = self.found[node] = self.derivative(node)
            for i, (like, needs) in enumerate(zip(found.metas(found.results), found.needs, strict=True)):
                if like is not None:
                    self.likes[node, i], self.needs[node, i] = like, needs

    def derivative(self, node: Node, tangents: Sequence[TensorMeta | None] | None = None) -> Recorded:
        """The derivative of a call, see `autopar.passes.autodiff.vjp`."""
        args, kwargs, operands = marked(node)
        keys = list(map(result_key, operands))
        return derivative(
            node.target, args, kwargs, [self.likes[k] for k in keys], [self.needs[k] for k in keys], tangents  # type: ignore[arg-type]
        )  # fmt: skip


class Maker(Protocol[T]):
    """Builds the values of a backward."""

    def value(self, key: ResultKey) -> T:
        """A value of the forward."""

    def call(self, target: Any, args: Any, kwargs: Any, operands: Sequence[T], origin: Node) -> Sequence[T | None]:
        """The results of a call that is not differentiated."""

    def gradients(self, node: Node, tangents: Sequence[T | None]) -> Sequence[T | None]:
        """The gradients of the operands of a call."""


class Backward(Generic[T]):
    """Runs the operators of a graph from the last to the first."""

    def __init__(self, forward: ForwardValues, make: Maker[T]) -> None:
        self.forward, self.make = forward, make
        self.arrived: dict[ResultKey, T] = {}

    def run(self, ends: Sequence[Node], tangents: Sequence[T]) -> dict[ResultKey, T]:
        """The gradients of the placeholders."""
        for end, tangent in zip(ends, tangents, strict=True):
            self._arrive(end, tangent, end)
        for node in reversed(self.forward.calls):
            if node in self.forward.own:
                self._own_backward(self.forward.own[node])
            elif is_call(node, RESULT):
                if (node, 0) in self.arrived:
                    self._arrive(parts_of_result(node)[1], self.arrived.pop((node, 0)), node)
            else:
                self._differentiate(node)
        return self.arrived

    def _arrive(self, at: Node, gradient: T, origin: Node) -> None:
        key = result_key(at)
        if key in self.arrived:
            addends = [self.arrived[key], gradient]
            (sum_,) = self.make.call(aten.add.Tensor, (Value(0), Value(1)), {}, addends, origin)
            assert sum_ is not None
            gradient = sum_
        self.arrived[key] = gradient

    def _differentiate(self, node: Node) -> None:
        tangents = [self.arrived.pop((node, i), None) for i in range(len(self.forward.found[node].results))]
        if any(t is not None for t in tangents):
            operands = marked(node)[2]
            for x, gradient in zip(operands, self.make.gradients(node, tangents), strict=True):
                if gradient is not None:
                    self._arrive(x, gradient, node)

    def _own_backward(self, own: CustomBackward) -> None:
        """The backward of the model's autograd function, which is a subgraph."""
        gradients = [self.arrived.pop((grad_output, 0), None) for grad_output in own.grad_outputs]
        if all(g is None for g in gradients):
            return
        pairs = zip(own.grad_outputs, self._checked(own, gradients))
        known = {(x, 0): self._zeros(x) if g is None else g for x, g in pairs}
        known |= {result_key(x): self.make.value(result_key(x)) for x in own.saved}
        for node in own.inside:
            if not is_entry(node):
                args, kwargs, operands = marked(node)
                made = self.make.call(node.target, args, kwargs, [known[result_key(x)] for x in operands], node)
                known |= {(node, i): x for i, x in enumerate(made) if x is not None}
        for x, gradient in zip(own.inputs, own.gradients, strict=True):
            if self.forward.needs[result_key(x)]:
                self._arrive(x, known[result_key(gradient)], own.token)

    def _checked(self, own: CustomBackward, gradients: list[T | None]) -> list[T | None]:
        if not own.zeros and any(g is None for g in gradients):
            raise ValueError(
                f"the autograd function {own.name} asks for None instead of gradients of zeros (set_materialize_grads) "
                "and one of its results has no gradient here; let its backward accept zeros"
            )
        return gradients

    def _zeros(self, like: Node) -> T:
        x = like.meta["val"]
        facts = {"dtype": x.dtype, "device": torch.device("cpu")}
        (made,) = self.make.call(torch.zeros, (list(x.shape),), facts, [], like)
        assert made is not None
        return made

"""trace_joint: a local graph becomes the joint graph of its forward and backward.

Consumes    a local graph.
Guarantees  the joint graph consists of core operators; those of the forward carry the metadata of the node they come
            from; backwards of the model's autograd functions (`autopar.ops.gradient`) run where autograd runs them.
Leaves      the values of the forward, and their order.

    y = f(x)    -->    y = f(x); gx = f_backward(gy, x)

The graph is built operator by operator, in autograd's order (`autopar.passes.autodiff.backward_builder`). The
decomposition of an operator and of its derivative is torch's (`autopar.passes.autodiff.vjp`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from autopar.adapters.copying.fake import new_mode
from autopar.adapters.fx.graph_nodes import new_node
from autopar.adapters.fx.lazy import graph_module
from autopar.adapters.operators import OpOverload, name_of
from autopar.capture.trace.op_decomposition import CoreCall, Recorded, TensorMeta, Value, fake_of, like_of
from autopar.ir.graph import fake_mode, is_call, outputs
from autopar.ir.meta import ORIGIN, TRACE, inherit
from autopar.ops.gradient import RESULT
from autopar.passes.autodiff.backward_builder import Backward, ForwardValues, ResultKey, parts_of_result, result_key
from autopar.passes.autodiff.vjp import derivative, marked

aten = torch.ops.aten


def joint_graph(gm: GraphModule, differentiable: Sequence[bool]) -> GraphModule:
    """Forward and backward of a flat functional graph as one graph of core operators.

    Args:
        gm: a graph of placeholders with fake values in ``meta["val"]`` and a flat tuple as output.
        differentiable: per placeholder, whether its gradient is wanted.

    Returns: a graph with the placeholders of ``gm``, then one tangent per output that has a gradient; it returns the
    outputs of ``gm``, then one gradient (or None) per placeholder. If no gradient is wanted: the forward alone.
    Raises ValueError where torch has no backward.
    """
    forward = ForwardValues(gm, differentiable)
    ends = [x for x in outputs(gm) if isinstance(x, Node) and forward.needs[result_key(x)]]
    likes = [forward.likes[result_key(x)] for x in ends]
    shapes = _Shapes(forward)
    Backward(forward, shapes).run(ends, likes)
    made = _Nodes(forward, shapes.found, likes)
    gradients = Backward(forward, made).run(ends, made.tangents)
    results = [made.made[result_key(x)] if isinstance(x, Node) else x for x in outputs(gm)]
    wanted = [gradients.get((n, 0)) if w else None for n, w in zip(forward.inputs, differentiable, strict=True)]
    made.graph.output((*results, *(wanted if any(differentiable) else ())))
    return graph_module(made.graph, "Joint")


class _Shapes:
    """The first run: the shapes of gradients, and from them the decomposition of each derivative."""

    def __init__(self, forward: ForwardValues) -> None:
        self.forward = forward
        self.found = dict(forward.found)

    def value(self, key: ResultKey) -> TensorMeta:
        return self.forward.likes[key]

    def call(
        self, target: Any, args: Any, kwargs: Any, operands: Sequence[TensorMeta], origin: Node
    ) -> list[TensorMeta | None]:
        found = derivative(target, args, kwargs, operands, [False for _ in operands])
        return found.metas(found.results)

    def gradients(self, node: Node, tangents: Sequence[TensorMeta | None]) -> list[TensorMeta | None]:
        found = self.found[node] = self.forward.derivative(node, tangents)
        return found.metas(found.gradients)


class _Nodes:
    """The second run: the nodes of the joint graph. The forward is copied when the object is created."""

    def __init__(self, forward: ForwardValues, found: Mapping[Node, Recorded], tangents: Sequence[TensorMeta]) -> None:
        self.graph, self.found = Graph(), found
        mode = fake_mode(forward.graph)
        self.mode = mode if hasattr(mode, "fake_tensor_converter") else new_mode()
        self.made: dict[ResultKey, Node] = {}
        self.numbers: dict[Node, dict[int, Node]] = {}
        for i, node in enumerate(forward.inputs, 1):
            self.made[node, 0] = self._placeholder(f"primals_{i}", forward.likes[node, 0])
        self.tangents = [self._placeholder(f"tangents_{i}", like) for i, like in enumerate(tangents, 1)]
        self.place = {node: i for i, node in enumerate(forward.calls)}
        self.place |= {x: self.place[token] for token, own in forward.own.items() for x in own.inside}
        for node in forward.calls:
            if is_call(node, RESULT):
                self.made[node, 0] = self._result(node)
            elif node in found:
                self._add(node, found[node])

    def value(self, key: ResultKey) -> Node:
        return self.made[key]

    def call(self, target: Any, args: Any, kwargs: Any, operands: Sequence[Node], origin: Node) -> list[Node | None]:
        likes = [like_of(x.meta["val"]) for x in operands]
        found = derivative(target, args, kwargs, likes, [False for _ in operands])  # type: ignore[arg-type]
        numbers = dict(enumerate(operands))
        for made in self._write(found, found.calls, numbers):
            inherit(made, origin, TRACE)
            made.meta["call"] = self.place.get(result_key(origin)[0], -1)
        return [None if v is None else numbers[v.number] for v in found.results]

    def gradients(self, node: Node, tangents: Sequence[Node | None]) -> list[Node | None]:
        found, numbers = self.found[node], self.numbers[node]
        numbers |= enumerate((t for t in tangents if t is not None), len(marked(node)[2]))
        for made in self._write(found, found.calls[found.forward :], numbers):
            inherit(made, node, TRACE)
            made.meta["call"] = self.place[node]
        return [None if v is None else numbers[v.number] for v in found.gradients]

    def _placeholder(self, name: str, like: TensorMeta) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = like.fake(self.mode)
        return node

    def _add(self, node: Node, found: Recorded) -> None:
        numbers = self.numbers[node] = dict(enumerate(self.made[result_key(x)] for x in marked(node)[2]))
        for made in self._write(found, found.calls[: found.forward], numbers):
            inherit(made, node, ORIGIN)
            made.meta["call"] = self.place[node]
        self.made |= {(node, i): numbers[v.number] for i, v in enumerate(found.results) if v is not None}

    def _result(self, node: Node) -> Node:
        """The value itself, or a clone if code outside may write to it."""
        value = self.made[result_key(parts_of_result(node)[0])]
        if not any(user.op == "output" for user in node.users):
            return value
        (copy,) = self.call(aten.clone.default, (Value(0),), {}, [value], node)
        assert copy is not None
        return copy

    def _write(self, found: Recorded, calls: Sequence[CoreCall], numbers: dict[int, Node]) -> Iterator[Node]:
        for call in calls:
            args, kwargs = map_aggregate(
                (call.args, call.kwargs), lambda x: numbers[x.number] if isinstance(x, Value) else x
            )
            name = name_of(call.target).rpartition(":")[2] if isinstance(call.target, OpOverload) else ""
            node = new_node(self.graph, "call_function", call.target, args, kwargs, name)
            numbers[call.number] = node
            node.meta["val"] = fake_of(found.likes[call.number], self.mode)
            node.meta["original_aten"] = call.original
            yield node

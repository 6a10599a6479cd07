"""Writes to values that share memory with detached ones.

`detach` gives a tensor without gradient in the same memory. Making in-place operators functional takes it for a view:
a write through it would lose the gradient of what is written, and that of the value behind it. So a detached value
that is written to gets memory of its own, and the values that would have changed with it are given what was written,
with the gradient they had: the added zeros are exact.

    y = detach(x); y.add_(e); f(y)      -->   y = clone(detach(x)); y.add_(e); f(y)
    y = detach(x); y.mul_(2); f(x, y)   -->   y = clone(detach(x)); y.mul_(2)
                                              x.copy_(detach(y) + (x - detach(x))); f(x, y)

Nothing changes where no value has a gradient, and for trained parameters (`autopar.ir.exported`).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from autopar.adapters.operators import mutates, writes_to
from autopar.capture.trace.decompose import REGION, may_alias

aten = torch.ops.aten


def separate(module: GraphModule, trained: Collection[str]) -> None:
    """Rewrite the graph of a module in place. ``trained``: names of placeholders of trained parameters."""
    for node in module.graph.nodes:
        if _is_no_grad(node):
            _drop_detached(_body(module, node).graph)
    shared = _Shared(module, trained)
    for detached in [d for d in shared.source if shared.is_written(d)]:
        _clone(detached)
    for write, value in list(shared.writes):
        _spread(shared, write, value)


def name_operands(module: GraphModule, region: Node) -> None:
    """Results of a region that are operands themselves, which it has written to, are these operands: a write under
    no_grad changes the value of a tensor, and not what autograd knows of it."""
    body = _body(module, region)
    outputs: Any = body.graph.output_node().args[0]
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    for user in list(region.users):
        inner: Any = outputs[user.args[1]] if user.target is operator.getitem else None
        while isinstance(inner, Node) and mutates(inner.target):
            inner = inner.args[0]
        operand = region.args[2 + inputs.index(inner)] if inner in inputs else None
        if isinstance(operand, Node):
            user.replace_all_uses_with(operand)


class _Shared:
    """Which nodes are one tensor for autograd: a value with its views, up to a detach.

    root: node -> the first node of its tensor. names: the reverse.
    source: a detached tensor's root -> the node that it was detached from.
    writes: (node, what it writes to), in order.
    written: the first node of a memory, where a gradient may be lost -> the last write to it.
    """

    def __init__(self, module: GraphModule, trained: Collection[str]) -> None:
        self.root, self.source, self.names = dict[Node, Node](), dict[Node, Node](), defaultdict[Node, list[Node]](list)
        self.writes: list[tuple[Node, Node]] = []
        self.differentiable = set[Node]()  # roots
        self.trained = trained
        for node in module.graph.nodes:
            self._add(node, module)
        lost = {self.top(root) for root in self.differentiable if self.top(root).name not in trained}
        self.written = {top: write for write, x in self.writes if (top := self.top(self.root[x])) in lost}

    def _add(self, node: Node, module: GraphModule) -> None:
        behind, is_detached = _behind(node, module)
        self.root[node] = root = node if behind is None or is_detached else self.root[behind]
        self.names[root].append(node)
        if behind is not None and is_detached:
            self.source[node] = behind
        written = list(_written(node, module))
        self.writes += [(node, x) for x in written]
        carries = any(self.root[x] in self.differentiable for x in node.all_input_nodes) and not _is_no_grad(node)
        if (carries and not is_detached and _is_float(node)) or node.name in self.trained:
            self.differentiable |= {self.root[x] for x in (node, *written)}

    def top(self, root: Node) -> Node:
        """The root of the tensor whose memory it is."""
        while root in self.source:
            root = self.root[self.source[root]]
        return root

    def is_written(self, detached: Node) -> bool:
        """Whether this memory is written to after the detach, and any tensor in it has a gradient."""
        top = self.top(detached)
        return top in self.written and self.written[top] > detached

    def beside(self, root: Node, at: Node) -> Iterator[tuple[Node, Node]]:
        """(a node of a tensor, the same value as a node of another one): what was detached before ``at``."""
        for detached, source in self.source.items():
            if detached < at and self.is_written(detached):
                if detached is root:
                    yield detached, source
                elif self.root[source] is root:
                    yield source, detached

    def is_used(self, root: Node, at: Node) -> bool:
        """Whether a tensor is used after a node. A placeholder is: its new value stays."""
        return root.op == "placeholder" or any(user > at for node in self.names[root] for user in node.users)


def _spread(shared: _Shared, write: Node, written: Node) -> None:
    """Give what was written to the other tensors in this memory."""
    seen, left, end = {shared.root[written]}, [shared.root[written]], write
    while left:
        for here, there in list(shared.beside(left.pop(), write)):
            root = shared.root[there]
            if root in seen:
                continue
            seen.add(root)
            left.append(root)
            if not shared.is_used(root, write):
                continue
            new = end = _after(end, aten.detach.default, _memory(here))
            if root in shared.differentiable:
                old = end = _after(end, aten.detach.default, _memory(there))
                zeros = end = _after(end, aten.sub.Tensor, _memory(there), old)
                new = end = _after(end, aten.add.Tensor, new, zeros)
            end = _after(end, aten.copy_.default, _memory(there), new)


def _memory(node: Node) -> Node:
    """The clone of a detached value."""
    return next((user for user in node.users if user.meta.get("own_memory")), node)


def _clone(detached: Node) -> None:
    users = list(detached.users)
    made = _after(detached, aten.clone.default, detached)
    made.meta["own_memory"] = True
    for user in users:
        user.replace_input_with(detached, made)


def _after(node: Node, target: Any, *args: Any) -> Node:
    with node.graph.inserting_after(node):
        made = node.graph.call_function(target, args)
    values = [x.meta["val"] for x in args]
    with torch.no_grad():
        made.meta = {**node.meta, "val": values[0] if target is aten.copy_.default else target(*values)}
    made.meta.pop("own_memory", None)
    return made


def _behind(node: Node, module: GraphModule) -> tuple[Node | None, bool]:
    """(the operand whose memory a result may share, whether autograd takes it for another tensor)."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        region = node.args[0]
        if not _is_no_grad(region):
            return region, False
        outputs: Any = _body(module, region).graph.output_node().args[0]
        return _operand(region, module, outputs[node.args[1]]), True
    if mutates(node.target):
        return next(iter(_written(node, module)), None), False
    if not isinstance(node.target, torch._ops.OpOverload) or not may_alias(node):
        return None, False
    operand = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    return operand, node.target is aten.detach.default


def _written(node: Node, module: GraphModule) -> Iterator[Node]:
    """What a node writes to."""
    if _is_no_grad(node):
        body = _body(module, node)
        for inner in body.graph.nodes:
            for x in _written(inner, body):
                if (operand := _operand(node, module, x)) is not None:
                    yield operand
    elif mutates(node.target):
        yield from (x for x in writes_to(node.target, node.args, node.kwargs) if isinstance(x, Node))  # type: ignore[arg-type]


def _operand(region: Node, module: GraphModule, inner: Any) -> Node | None:
    """The operand of a region that a node of its body may be a view of."""
    body = _body(module, region)
    while isinstance(inner, Node) and inner.op != "placeholder":
        inner, _ = _behind(inner, body)
    if inner is None:
        return None
    index = [n for n in body.graph.nodes if n.op == "placeholder"].index(inner)
    found = region.args[2 + index]
    return found if isinstance(found, Node) else None


def _drop_detached(graph: Graph) -> None:
    """detach(x) is x where nothing has a gradient, for what the graph has computed itself."""
    for node in [n for n in graph.nodes if n.target is aten.detach.default]:
        first = node.args[0]
        while isinstance(first, Node) and first.op == "call_function" and may_alias(first):
            first = first.args[0] if first.args else None
        if isinstance(first, Node) and first.op == "call_function":
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _is_no_grad(node: Node) -> bool:
    return node.target is REGION and node.args[0] is False


def _body(module: GraphModule, region: Node) -> GraphModule:
    name: Any = region.args[1]
    body = getattr(module, str(name.target))
    assert isinstance(body, GraphModule)
    return body


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()

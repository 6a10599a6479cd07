"""When the collectives of a step graph are waited for, and which operands they may overwrite.

A collective, a copy to or from the host, or a question to experts on other ranks starts at its position in the graph,
and is waited for at a later one. The
executor (`autopar.runtime.exec.lowering`) asks here, and so does the memory model (`autopar.ir.storages`).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.adapters.operators import OpOverload
from autopar.ir.graph import arguments, is_call, layer_of, nbytes
from autopar.ops.traits import ASKS, COLLECTIVES, COPIES, aliases


def is_started(node: Node) -> bool:
    """Whether a call starts at its position, and is waited for at a later one."""
    return node.op == "call_function" and node.target in (*COLLECTIVES, *COPIES, *ASKS) and bool(node.users)


aten = torch.ops.aten


class WaitPlaces:
    """Where collectives of a graph are waited for: right before their first user, results of the graph earlier.

    Gradients leave a graph at its end, and until a reduce-scatter is waited for, NCCL keeps the whole gradient that it
    was given. So those in flight keep at most twice the largest: the oldest are waited for when more start. Copies to
    the host keep their operand: they have the time of one further layer.
    """

    def __init__(self, gm: GraphModule) -> None:
        self._place = {node: i for i, node in enumerate(gm.graph.nodes)}
        self._due: dict[Node, list[Node]] = {}  # first user -> collectives that it waits for
        self._finished: set[Node] = set()
        self._kept: dict[Node, int] = {}  # reduce-scatters in flight -> bytes, the oldest first
        self._layer, self._layers = "", 0  # the running layer, how many have begun
        self._leaving: dict[Node, int] = {}  # copies to the host in flight -> layers that had begun
        self._most = 2 * max((self._bytes(node) for node in gm.graph.nodes), default=0)

    @staticmethod
    def _bytes(node: Node) -> int:
        """Bytes that a reduce-scatter keeps; 0 for any other node."""
        scatters = is_call(node, torch.ops.autopar.reduce_scatter.default)
        return nbytes(arguments(node)["x"]) if scatters else 0

    def started(self, node: Node) -> list[Node]:
        """Start a collective; returns those to wait for now."""
        first = min(node.users, key=self._place.__getitem__)
        self._due.setdefault(first, []).append(node)
        if size := self._bytes(node):
            self._kept[node] = size
        if is_call(node, torch.ops.autopar.to_host.default):
            self._leaving[node] = self._layers
        early = []
        while sum(self._kept.values()) > self._most:
            early.append(next(iter(self._kept)))
            del self._kept[early[-1]]
        self._finished.update(early)
        return early

    def before(self, node: Node) -> list[Node]:
        """Those to wait for before a node."""
        found = [collective for collective in self._due.pop(node, []) if collective not in self._finished]
        found += self._left(node)
        for collective in found:
            self._kept.pop(collective, None)
            self._leaving.pop(collective, None)
        return found

    def _left(self, node: Node) -> list[Node]:
        """Copies to the host that have overlapped one layer, when another begins."""
        if node.op != "call_function" or layer_of(node) == self._layer:
            return []
        self._layer, self._layers = layer_of(node), self._layers + 1
        found = [copy for copy, begun in self._leaving.items() if begun < self._layers - 1]
        self._finished.update(found)
        return found


_MOVE_TOKENS = tuple(
    getattr(torch.ops.autopar, kind).default
    for kind in ("all_to_all_rows", "all_to_all", "all_gather", "reduce_scatter")
)


def pauses_at(collectives: Iterable[Node], axis: str) -> bool:
    """Whether a step graph that may pause does so before it waits for these: one of them is an answer of experts in a
    role of their own, or over ``axis``, which experts are sharded on, or over a level of it. Depends on the graph only,
    so all ranks that run it pause alike."""
    collectives = list(collectives)
    if any(node.target in ASKS for node in collectives):
        return True
    over = (str(arguments(node)["axis"]) for node in collectives if axis and node.target in _MOVE_TOKENS)
    return any(re.split("[%/]", name)[0] == axis for name in over)


def overwritten(node: Node) -> Node | None:
    """The operand that a call overwrites with its result, if any: of an all-reduce, of a sum of two values, and of a
    sum that a product is added to, which the graph may have been given for it."""
    if (given := donated(node)) is not None:
        return given
    if is_call(node, torch.ops.autopar.all_reduce.default):
        may = [node.args[0]]
    elif is_call(node, aten.add.Tensor, aten.addmm.default) and not node.kwargs:
        may = [x for x in node.args[: 2 if node.target is aten.add.Tensor else 1] if _fits(x, node)]
    else:
        return None
    return next((x for x in may if isinstance(x, Node) and is_temporary(x, node)), None)


SUM_OF: dict[Any, Any] = {  # a product -> a sum and the product
    aten.mm.default: aten.addmm.default,
    aten.mul.Tensor: aten.addcmul.default,
}
PRODUCT_OF: dict[Any, Any] = {added: product for product, added in SUM_OF.items()}


def donated(node: Node) -> Node | None:
    """The sum of earlier microbatches that a product is added to in place, if it is."""
    if node.target not in PRODUCT_OF or node.kwargs:
        return None
    given = node.args[0]
    alone = isinstance(given, Node) and given.meta.get("donated") and list(given.users) == [node]
    return given if alone and _fits(given, node) else None  # type: ignore[return-value]


def _fits(x: Any, node: Node) -> bool:
    """Whether an operand has room for each element of a result."""
    value, made = x.meta["val"] if isinstance(x, Node) else None, node.meta["val"]
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (made.shape, made.dtype):
        return False
    return bool(value.is_contiguous() and made.is_contiguous())


def is_temporary(x: Node, user: Node) -> bool:
    """Whether ``user`` may overwrite x: nothing else uses its storage, and it is not an input of the graph."""
    while True:
        if x.op != "call_function" or list(x.users) != [user]:
            return False
        if x.target is operator.getitem:  # of several fresh results, or of views: the producer decides
            source = x.args[0]
            return isinstance(source, Node) and not _returns_alias(source)
        if not _returns_alias(x):
            return True
        operands = x.all_input_nodes
        if len(operands) != 1:
            return False
        x, user = operands[0], x


def _returns_alias(node: Node) -> bool:
    return not isinstance(node.target, OpOverload) or aliases(node.target)

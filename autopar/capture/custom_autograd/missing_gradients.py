"""Whether a backward that gets None for results without gradient returns what it would return for gradients of zeros.

With `set_materialize_grads(False)` torch hands None to a backward. Which results have no gradient is known only where
the joint graph is made, and the traced backward runs on zeros there. So what it computes of None has to be what it
computes of zeros, for every choice of results: the operators that it calls with all gradients, where those that are
missing are zeros and sums and products with zeros are worked out, have to be those that it calls with None. Both are
graphs without writes.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autopar.adapters.dispatch import without_modes

MOST_RESULTS = 4  # with a gradient: all choices of them are compared
_ZERO = "zeros"
_PRODUCTS = {"mul", "multiply", "matmul", "mm", "bmm", "mv", "dot", "outer"}  # zeros if one factor is
_OF_FIRST = {
    "view", "reshape", "transpose", "permute", "t", "expand", "sum", "mean", "neg", "negative", "clone", "_to_copy",
    "squeeze", "unsqueeze", "flatten", "detach", "div", "select", "slice", "split", "split_with_sizes", "narrow",
    "chunk", "unbind", "movedim", "alias", "view_copy", "_unsafe_view", "as_strided", "abs", "getitem",
}  # fmt: skip  # zeros if the first argument is
_OF_ZEROS = {"zeros", "zeros_like", "new_zeros"}
State = Mapping[str, Any]
Backward = Callable[[State, Sequence[Tensor | None]], Sequence[Any]]


def none_is_zeros(backward: Backward, state: State, given: Sequence[Tensor | None], results: Sequence[int]) -> bool:
    """Whether gradients of the inputs are the same for None and for zeros, whichever of the ``results`` have none.
    state: what the backward has of its forward. given: gradients of all results. False where that is not seen."""
    if len(results) > MOST_RESULTS:
        return False
    try:
        everything = _Trace.of(backward, state, given)
        for count in range(1, len(results)):
            for missing in itertools.combinations(results, count):
                zeros = {id(given[i]) for i in missing}
                without = _Trace.of(backward, state, [None if i in missing else x for i, x in enumerate(given)])
                if everything.gradients(zeros) != without.gradients(set()):
                    return False
    except Exception:  # of the user's backward, for gradients that it is never given
        return False
    return True


class _Trace:
    """The operators that a backward calls. inputs: identities of the tensors that it is given, in order."""

    def __init__(self, graph: Graph, inputs: Sequence[int]) -> None:
        self.graph, self.inputs = graph, inputs

    @classmethod
    def of(cls, backward: Backward, state: State, given: Sequence[Tensor | None]) -> _Trace:
        leaves, spec = pytree.tree_flatten((dict(state), list(given)))
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

        def run(tensors: list[Tensor]) -> list[Any]:
            own = dict(zip(places, tensors, strict=True))
            kept, incoming = pytree.tree_unflatten([own.get(i, x) for i, x in enumerate(leaves)], spec)
            return list(backward(kept, incoming))

        with without_modes(), torch._C.DisableTorchFunction(), FakeTensorMode(), torch.no_grad():
            alike = [_like(leaves[i]) for i in places]
            graph = make_fx(functionalize(run, remove="mutations"))(alike).graph
        return cls(graph, [id(leaves[i]) for i in places])

    def gradients(self, zeros: set[int]) -> list[Hashable]:
        """Expressions of the gradients. zeros: identities of inputs that are."""
        known: dict[Node, Hashable] = {}
        inputs = iter(self.inputs)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                known[node] = _ZERO if (given := next(inputs)) in zeros else ("a tensor", given)
            elif node.op == "get_attr":
                raise ValueError("a tensor of which nothing is known")
            elif node.op == "call_function":
                known[node] = _expression(node, known)
        made = self.graph.output_node().args[0]
        return [_ZERO if x is None else known[x] for x in made]  # type: ignore[union-attr, index]


def _like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _expression(node: Node, known: Mapping[Node, Hashable]) -> Hashable:
    name, leaves = _name(node), pytree.tree_leaves((node.args, node.kwargs))
    operands = [known[x] if isinstance(x, Node) else x if x is None or _is_number(x) else repr(x) for x in leaves]
    if name in _OF_ZEROS or (name in _PRODUCTS and _ZERO in operands):
        return _ZERO
    if operands and operands[0] == _ZERO and name in _OF_FIRST:
        return _ZERO
    if name in ("add", "sub") and len(operands) == 2:
        one, other = operands
        if _is_zero(other) and _alike(leaves[0], node):
            return one
        if name == "add" and _is_zero(one) and _alike(leaves[1], node):
            return other
    return (str(node.target), tuple(operands), str(pytree.tree_structure((node.args, node.kwargs))))


def _name(node: Node) -> str:
    return "getitem" if node.target is operator.getitem else str(node.target.__name__).partition(".")[0]  # type: ignore[union-attr]


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float))


def _is_zero(x: Hashable) -> bool:
    return x == _ZERO or (_is_number(x) and x == 0)


def _alike(x: Any, result: Node) -> bool:
    """Whether a sum with zeros has the shape and dtype of its other addend."""
    if not isinstance(x, Node):
        return False
    one, two = x.meta["val"], result.meta["val"]
    return bool(one.shape == two.shape and one.dtype == two.dtype)

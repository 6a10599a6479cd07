"""Where the backward of an eager forward would go: from its outputs, through the nodes of autograd, to leaves.

    loss.grad_fn -> MseLossBackward -> AddmmBackward -> AccumulateGrad of first.weight

While a forward is traced, autograd runs beside the tracer and knows what a graph may not: which parameters the outputs
reach, and an `autograd.Function` whose backward nobody captured. Where values of the graph stand in place of the
forward's own (copies of alike blocks, derivatives), the path goes on as `continues_at` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

Continuations = dict[Any, Sequence[Tensor] | None]  # node of a tensor -> where its path goes on; None: unknown
UNKNOWN = 1  # the bit of a path whose end is not known

_CONTINUATIONS: ContextVar[Continuations | None] = ContextVar("continuations", default=None)
_HOLE = "autopar_gradient_of"
_SCRIPTED = "torch::jit::(anonymous namespace)::DifferentiableGraphBackward"


@contextmanager
def followed_paths() -> Iterator[None]:
    """Around a capture: `continues_at` is remembered."""
    token = _CONTINUATIONS.set({})
    try:
        yield
    finally:
        _CONTINUATIONS.reset(token)


def continues_at(made: Tensor, tensors: Sequence[Tensor] | None) -> None:
    """The path of a tensor that stands for a value of the graph goes on at these; None: nobody knows where."""
    known = _CONTINUATIONS.get()
    node = node_of_gradient(made)
    if known is not None and node is not None:
        known[node] = tensors


def node_of_gradient(x: Tensor) -> Any:
    """The node of autograd that a gradient of the tensor goes to; None if it needs none. Of a leaf, its accumulator."""
    if not x.requires_grad:
        return None
    return x.grad_fn if x.grad_fn is not None else torch.autograd.graph.get_gradient_edge(x).node


class BackwardPaths:
    """``ends``: node -> the bits that a path which arrives there has reached; it ends there."""

    def __init__(self, ends: Mapping[Any, int]) -> None:
        self._reached: dict[Any, int] = dict(ends)
        self._continuations = _CONTINUATIONS.get() or {}
        self.nodes: list[Any] = []  # on the paths so far

    def reached(self, x: Tensor) -> int:
        """The bits of all ends that the backward of a tensor reaches."""
        start = node_of_gradient(x)
        return self._of(start) if start is not None else 0

    def _of(self, start: Any) -> int:
        found, stack = self._reached, [start]
        while stack:
            node = stack[-1]
            if node in found:
                stack.pop()
                continue
            unknown, following = self._following(node)
            missing = [x for x in following if x not in found]
            if missing:
                stack += missing
                continue
            stack.pop()
            self.nodes.append(node)
            bits = unknown
            for x in following:
                bits |= found[x]
            found[node] = bits
        return found[start]

    def _following(self, node: Any) -> tuple[int, list[Any]]:
        """(UNKNOWN or 0, the nodes behind one)."""
        if node in self._continuations:
            tensors = self._continuations[node]
            nodes = map(node_of_gradient, tensors or ())
            return (UNKNOWN if tensors is None else 0), [x for x in nodes if x is not None]
        if _HOLE in node.name():  # stands for a gradient, and passes none on
            return 0, []
        return 0, [x for x, _ in node.next_functions if x is not None]

    def out_of_sight(self) -> str:
        """What is wrong with a node on the paths whose backward is not that of operators of the graph; "" if none is."""
        for node in self.nodes:
            cls = node._forward_cls if isinstance(node, BackwardCFunction) else None
            if cls is not None and not cls.__module__.startswith("torch._"):  # torch's operators are made of those
                return (
                    f"the autograd function {cls.__qualname__} is called around torch.autograd.Function.apply, where "
                    f"its backward cannot be captured; call {cls.__qualname__}.apply"
                )
            if node.name() == _SCRIPTED:
                return (
                    "a function of torch.jit in the forward has been called before, and differentiates itself since; "
                    "call what was scripted or traced, or parallelize before its first call"
                )
        return ""

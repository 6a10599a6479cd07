"""Paths of an eager backward: from outputs, through autograd nodes, to leaves.

    loss.grad_fn -> MseLossBackward -> AddmmBackward -> AccumulateGrad of first.weight

While a forward is traced, autograd records what a graph may not show: which parameters the outputs depend on, and an
`autograd.Function` whose backward was not captured. Where tensors are created for values of the graph (copied layers,
derivatives), `continues_at` connects the path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from autopar.adapters.keys import Same

Continuations = dict[Any, Sequence[Tensor] | None]  # start of a tensor -> where its path goes on; None: unknown
UNKNOWN = 1  # the bit of a path whose end is not known

_CONTINUATIONS: ContextVar[Continuations | None] = ContextVar("continuations", default=None)
_LOST = "lost"
_LEAF = "torch::autograd::AccumulateGrad"
_GRAD_OUTPUT = "autopar_gradient_of"
_SCRIPTED = "torch::jit::(anonymous namespace)::DifferentiableGraphBackward"


@contextmanager
def followed_paths() -> Iterator[None]:
    """Context manager around a capture that keeps the connections of `continues_at`."""
    token = _CONTINUATIONS.set({})
    try:
        yield
    finally:
        _CONTINUATIONS.reset(token)


def continues_at(made: Tensor, tensors: Sequence[Tensor] | None) -> None:
    """Continue the path of a tensor at these tensors; None: unknown."""
    known, start = _CONTINUATIONS.get(), start_of(made)
    if known is not None and start is not None:
        known[start] = tensors


def lose_paths() -> None:
    """From now on all paths are unknown."""
    known = _CONTINUATIONS.get()
    if known is not None:
        known[_LOST] = None


def start_of(x: Tensor) -> Any:
    """The start of a tensor's backward: its grad_fn, or the leaf itself; None without gradient."""
    with torch._C.DisableTorchFunction():
        return (x.grad_fn or Same(x)) if x.requires_grad else None


class GradFnPaths:
    """Reachability through autograd nodes. ``ends``: `start_of` a tensor -> its bits; a path ends there."""

    def __init__(self, ends: Mapping[Any, int]) -> None:
        self._reached: dict[Any, int] = dict(ends)
        self._continuations = _CONTINUATIONS.get() or {}
        self._nodes: list[Any] = []  # on the paths so far

    def reached(self, x: Tensor) -> int:
        """The bits of all ends that a tensor's backward reaches."""
        start = start_of(x)
        if start is None:
            return 0
        found, stack = self._reached, [start]
        while stack:
            place = stack[-1]
            if place in found:
                stack.pop()
                continue
            bits, following = self._following(place)
            missing = [x for x in following if x not in found]
            stack += missing
            if not missing:
                stack.pop()
                for x in following:
                    bits |= found[x]
                found[place] = bits
        return found[start] | (UNKNOWN if _LOST in self._continuations else 0)

    def _following(self, place: Any) -> tuple[int, list[Any]]:
        """(UNKNOWN or 0, the next nodes or leaves)."""
        if place in self._continuations:
            tensors = self._continuations[place]
            starts = map(start_of, tensors or ())
            return (UNKNOWN if tensors is None else 0), [x for x in starts if x is not None]
        if isinstance(place, Same):  # another leaf
            return 0, []
        self._nodes.append(place)
        if _GRAD_OUTPUT in place.name():  # a grad_output: paths end there
            return 0, []
        nodes = (x for x, _ in place.next_functions if x is not None)
        return 0, [Same(x.variable) if x.name() == _LEAF else x for x in nodes]

    def out_of_sight(self) -> str:
        """The error for a node on the paths that belongs to no operator of the graph; "" if there is none."""
        for node in self._nodes:
            cls: Any = getattr(node, "_forward_cls", None) if isinstance(node, BackwardCFunction) else None
            if cls is not None and not cls.__module__.startswith("torch._"):  # those are torch's own
                return (
                    f"the autograd function {cls.__qualname__} is called without torch.autograd.Function.apply, so its "
                    f"backward cannot be captured; call {cls.__qualname__}.apply"
                )
            if node.name() == _SCRIPTED:
                return (
                    "a torch.jit function in the forward was called before, and has compiled its own backward; call "
                    "the original Python function, or parallelize before its first call"
                )
        return ""

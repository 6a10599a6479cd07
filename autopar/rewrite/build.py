"""How rewrites create nodes: call an operator on nodes, get a node with its fake value and provenance.

A rewrite is `(node, build) -> Node | None`: the node that replaces ``node``, or None to leave it. New nodes stand right
before the old one, so operands are always defined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autopar.ir.graph import insert_call

Rewrite = Callable[[Node, "Build"], Node | None]


@dataclass
class Build:
    """Creates nodes before ``at``, with the provenance of ``like`` (default: ``at``)."""

    at: Node
    like: Node | None = None

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A call node; its value is the operator's result on the fake operands."""
        return insert_call(self.at, target, args, kwargs, like=self.like)

    def reshape(self, x: Node, shape: Sequence[int]) -> Node:
        """x in another shape; x itself if that is its shape; if x is a reshape, its operand is reshaped instead."""
        aten = torch.ops.aten
        while calls(x, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim):
            x = operand(x)
        return x if tuple(shape) == shape_of(x) else self(torch.ops.aten.reshape.default, x, list(shape))

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        return x if value_of(x).dtype == dtype else self(torch.ops.aten._to_copy.default, x, dtype=dtype)


def value_of(node: Node) -> Tensor:
    """The fake value of a node with one tensor result."""
    value = node.meta["val"]
    assert isinstance(value, Tensor), f"normalize: {node.name} does not return one tensor"
    return value


def shape_of(node: Node) -> tuple[int, ...]:
    """Shape of the one tensor that a node returns."""
    return tuple(value_of(node).shape)


def operand(node: Node, position: int = 0) -> Node:
    """The operand node at a position of operators whose tensors come first."""
    found = node.args[position]
    assert isinstance(found, Node), f"normalize: operand {position} of {node.name} is {found!r}"
    return found


def calls(node: Any, *targets: Any) -> bool:
    """Whether this is a node that calls one of the targets."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets

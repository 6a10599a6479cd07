"""Whether a forward computes the same for one token as for several: ``if ids.shape[1] == 1: ...`` is refused.

The graphs of the two lengths may differ in what one token does not notice: views, and which keys are hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autopar.compile.any_length import numbers
from autopar.compile.length_values import Values, same_for_tokens
from autopar.ir.graph import arguments, describe, outputs, reach, shape
from autopar.ir.meta import input_specs

aten = torch.ops.aten
_ATTENTION = torch.ops.autopar.attention.default
_SEEN = ("q", "k", "v", "sinks", "scale", "softcap")  # arguments of attention that one token notices
_VIEWS = (
    aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.alias.default,
    aten.clone.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.transpose.int, aten.permute.default, aten.slice.Tensor, aten.select.int, aten.t.default,
    aten.contiguous.default, aten.detach.default,
)  # fmt: skip


def check_one_token(
    several: GraphModule, one: GraphModule, total: int, tokens: str, buffers: Mapping[str, Tensor]
) -> None:
    """Raises ValueError, with the operator, if the normalized graph of one token computes other logits than that of
    several does for the first. ``total``: the number of tokens of the model's own graph; ``tokens``: the name of the
    ids; ``buffers``: values of buffers by name."""
    long, short = _Side(several, tokens, buffers), _Side(one, tokens, buffers)
    same: dict[Node, Node] = {}
    for a, b in itertools.zip_longest(long.of_ids(), short.of_ids()):
        if a is None or b is None or not _alike(a, b, long, short, same):
            raise ValueError(
                f"serve: the forward runs other operators for one token than for {total}, from {describe(a or b)} on, "
                "so requests of one token would not get what it gives them; generate with the model itself"
            )
        same[a] = b


class _Side:
    """One of the two graphs."""

    def __init__(self, gm: GraphModule, tokens: str, buffers: Mapping[str, Tensor]) -> None:
        self.gm, self.values = gm, Values(gm, tokens, buffers)
        self.specs = input_specs(gm)

    def of_ids(self) -> list[Node]:
        """The calls on the way from the ids to the logits, without views."""
        behind = set(reach(outputs(self.gm)[:1], lambda node: [x for _, x in self.operands(node)]))
        return [n for n in self.gm.graph.nodes if n in behind and n.op == "call_function" and not self.passes(n)]

    def passes(self, node: Node) -> bool:
        if node.target is aten.index.Tensor:  # of the last token
            return shape(node) == shape(node.all_input_nodes[0])
        return self.values.known(node) or node.target in _VIEWS

    def operands(self, node: Node) -> list[tuple[Any, Node]]:
        if node.target is _ATTENTION:
            known = arguments(node)
            given = {name: known[name] for name in _SEEN if isinstance(known[name], Node)}
            return [(name, x.meta.get("unfolded", x)) for name, x in given.items()]
        return list(enumerate(node.all_input_nodes))

    def source(self, x: Node) -> Node:
        while x.op == "call_function" and not self.values.known(x) and self.passes(x):
            x = x.all_input_nodes[0]
        return x


def _alike(a: Node, b: Node, long: _Side, short: _Side, same: dict[Node, Node]) -> bool:
    if a.target != b.target:
        return False
    if a.target is _ATTENTION:
        if any(arguments(a)[name] != arguments(b)[name] for name in ("scale", "softcap")):
            return False
    elif any(x != y for x, y in numbers(a, b)):
        return False
    ours, theirs = long.operands(a), short.operands(b)
    if len(ours) != len(theirs):
        return False
    for (name, given), (other, taken) in zip(ours, theirs, strict=True):
        x, y = long.source(given), short.source(taken)
        if name != other or long.values.known(x) != short.values.known(y):
            return False
        if long.values.known(x) and (x.op != "placeholder" or y.op != "placeholder"):
            if not same_for_tokens(a, x, long.values.of(x), short.values.of(y)):
                return False
        elif x.op == "placeholder":
            if long.specs[x.name].name != short.specs[y.name].name:
                return False
        elif same.get(x) is not y or not _same_places(given, x, taken, y):
            return False
    return True


def _same_places(a: Node, x: Node, b: Node, y: Node) -> bool:
    """Whether views, from x to a and from y to b, put the entries of a token in the same places. Not asked where tokens
    share a dim with others."""
    if not isinstance(y.meta["val"], Tensor) or _fits(shape(y), shape(x)) is None:
        return True
    places = torch.arange(y.meta["val"].numel()).reshape(shape(y))
    of_one, of_several = _viewed(b, y, places), _viewed(a, x, places.expand(shape(x)))
    fits = _fits(of_one.shape, of_several.shape)
    return fits is None or bool((of_several == of_one).all())


def _fits(one: Sequence[int], several: Sequence[int]) -> bool | None:
    """True if the shapes differ in dims of tokens alone, None if that is not known."""
    return True if len(one) == len(several) and all(n in (1, m) for n, m in zip(one, several)) else None


def _viewed(end: Node, start: Node, value: Tensor) -> Tensor:
    """The views that lead from one node to another, of a value."""
    chain = []
    while end is not start:
        chain.append(end)
        end = end.all_input_nodes[0]
    for node in reversed(chain):
        if node.target is not aten.index.Tensor:
            value = node.target(value, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return value

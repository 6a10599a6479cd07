"""Loops over experts in a captured graph: chains of sums, each of which adds what one expert makes of its tokens.

y1 = add(y0, sum(view(where(mask of expert 0, v0, 0))))
y2 = add(y1, sum(view(where(mask of expert 1, v1, 0))))        or  y2 = where(mask of expert 1, v1, y1)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.capture.branches.expert_masks import ExpertMask, expert_mask
from autopar.ir.graph import frozen, is_call
from autopar.ops.traits import is_random

aten = torch.ops.aten
SAME = (aten.clone.default, aten.alias.default, aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_BETWEEN = (*SAME, aten.sum.dim_IntList, aten.permute.default, aten._to_copy.default, aten.to.dtype)
_ZEROS = (aten.zeros.default, aten.full.default)


class NotGrouped(Exception):
    """Why a loop is left as it is."""


@dataclass(frozen=True)
class Turn:
    """One expert. where(mask, value, ...) is ``end``; ``total``: what is added; ``sum``: the result, ``base``: what it
    is added to. ``shape``: of the mask, whose entries are the rows of the value. ``puts``: the value replaces."""

    end: Node
    mask: ExpertMask
    shape: tuple[int, ...]
    total: Node
    sum: Node
    base: Node
    puts: bool = False

    @property
    def value(self) -> Node:
        found: Any = self.end.args[1]
        return found


@dataclass(frozen=True)
class Loop:
    """The turns of a chain, in order."""

    turns: list[Turn]

    @property
    def by_expert(self) -> list[Turn]:
        return sorted(self.turns, key=lambda turn: turn.mask.expert)


class Numbers:
    """Equal numbers for nodes that compute the same."""

    def __init__(self) -> None:
        self._of: dict[Node, int] = {}
        self._known: dict[Any, int] = {}

    def __call__(self, node: Node) -> int:
        pending = [node]
        while pending:
            x = pending[-1]
            left = [y for y in x.all_input_nodes if y not in self._of]
            if x in self._of or not left:
                pending.pop()
                if x not in self._of:
                    self._of[x] = self._known.setdefault(self._key(x), len(self._known))
            else:
                pending += left
        return self._of[node]

    def _key(self, x: Node) -> Any:
        if x.op != "call_function" or is_random(x.target):
            return x
        args = frozen(tuple(x.args), self._leaf), frozen(dict(x.kwargs), self._leaf)
        try:
            hash(args)
        except TypeError:
            return x
        return x.target, args

    def _leaf(self, x: Any) -> Any:
        return ("node", self._of[x]) if isinstance(x, Node) else (type(x), x)


def expert_loops(graph: Graph) -> list[Loop]:
    """The loops of a graph, over at least two experts."""
    turns = [turn for node in graph.nodes if (turn := _turn(node)) is not None]
    after = {turn.sum: turn for turn in turns}
    follows = {id(turn): after.get(_resolved(turn.base)) for turn in turns}
    loops: list[list[Turn]] = []
    for turn in turns:
        before = follows[id(turn)]
        loop = next((x for x in loops if x[-1] is before), None)
        if loop is not None:
            loop.append(turn)
        else:
            loops.append([turn])
    return [Loop(loop) for loop in loops if len(loop) > 1]


def check_alike(loop: Loop, number: Numbers) -> None:
    """Raises NotGrouped unless the turns are all experts of one choice, and nothing looks at a sum in between."""
    first = loop.turns[0]
    experts = sorted(turn.mask.expert for turn in loop.turns)
    if experts != list(range(len(experts))):
        raise NotGrouped(f"its experts are {experts}, not each of 0 to {len(experts) - 1} once")
    for turn in loop.turns:
        if _facts(turn, number) != _facts(first, number):
            raise NotGrouped("its experts are chosen by different values")
    chain = {turn.sum for turn in loop.turns}
    for turn, after in zip(loop.turns, loop.turns[1:], strict=False):
        for user in _seen_by(turn.sum):
            if user is not after.sum and user not in chain:
                raise NotGrouped("the sum over experts is used before it is complete")


def _facts(turn: Turn, number: Numbers) -> Any:
    kept = tuple((number(x), at) for x, at in turn.mask.kept)
    return number(turn.mask.index), turn.mask.places, kept, turn.shape, turn.puts


def _seen_by(node: Node) -> list[Node]:
    """Users of a value, through copies of it; not those that only take its shape."""
    found = []
    for user in node.users:
        if is_call(user, aten.copy.default):
            found += _seen_by(user) if user.args[1] is node else []
        elif is_call(user, aten.alias.default, aten.clone.default):
            found += _seen_by(user)
        else:
            found.append(user)
    return found


def _resolved(node: Node) -> Node:
    """Behind copies."""
    while is_call(node, aten.copy.default, aten.alias.default, aten.clone.default):
        node = node.args[1] if is_call(node, aten.copy.default) else node.args[0]  # type: ignore[assignment]
    return node


def _turn(node: Node) -> Turn | None:
    if not is_call(node, aten.where.self) or not node.meta["val"].is_floating_point():
        return None
    cond, value, other = node.args
    found = mask_behind(cond)
    if found is None or not isinstance(value, Node) or not isinstance(other, Node):
        return None
    mask, shape = found
    if not is_zero(other):
        base = _resolved(other)
        whole = other.meta["val"].shape == node.meta["val"].shape and base.op == "call_function"
        return Turn(node, mask, shape, node, node, other, puts=True) if whole else None
    total = node
    while len(total.users) == 1 and is_call(user := next(iter(total.users)), *_BETWEEN):
        total = user
    if len(total.users) != 1 or not is_call(user := next(iter(total.users)), aten.add.Tensor) or user.kwargs:
        return None
    a: Any
    b: Any
    a, b = user.args
    if a is b or not isinstance(b, Node):
        return None
    base = b if a is total else a
    if base.meta["val"].shape != user.meta["val"].shape:
        return None
    return Turn(node, mask, shape, total, user, base)


def is_zero(node: Node) -> bool:
    """Whether a node is the number 0."""
    return is_call(node, *_ZEROS) and not node.meta["val"].dim() and not (node.args[1:2] and node.args[1])


def mask_behind(cond: Any) -> tuple[ExpertMask, tuple[int, ...]] | None:
    """(what a condition that is a view of a mask says, the shape of that mask)"""
    best = None
    while isinstance(cond, Node):
        found = expert_mask(cond)
        best = best if found is None else (found, tuple(cond.meta["val"].shape))
        cond = cond.args[0] if is_call(cond, *SAME) else None
    return best

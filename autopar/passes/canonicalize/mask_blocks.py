"""Masks too large to be evaluated as a whole: what they say of blocks of rows and columns.

A block is taken apart into four until the bounds of its values decide, or it is small and is evaluated. Positions
are monotonous, so all blocks but those along an edge of the mask are decided by their bounds: a triangle of 128K
tokens takes a few hundred small blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from autopar.adapters.operators import OpOverload
from autopar.ir.graph import arguments
from autopar.ops.traits import FILL_VALUES
from autopar.rewrite.build import calls, operand, shape_of, value_of

aten = torch.ops.aten
_LEAF = 512  # rows and columns of a block that is evaluated
_ALIKE = (aten.alias.default, aten.clone.default, aten.expand.default)
_LEADING = (aten.reshape.default, aten.view.default, aten.unsqueeze.default)
_DIFFERENCES: dict[Any, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    # (where it is sure, where it is possible) from the bounds of a - b
    aten.le: lambda lo, hi: (hi <= 0, lo <= 0),
    aten.lt: lambda lo, hi: (hi < 0, lo < 0),
    aten.ge: lambda lo, hi: (lo >= 0, hi >= 0),
    aten.gt: lambda lo, hi: (lo > 0, hi > 0),
    aten.eq: lambda lo, hi: ((lo == 0) & (hi == 0), (lo <= 0) & (hi >= 0)),
    aten.ne: lambda lo, hi: ((lo > 0) | (hi < 0), (lo != 0) | (hi != 0)),
}
_AND, _OR = (aten.logical_and, aten.bitwise_and, aten.__and__), (aten.logical_or, aten.bitwise_or, aten.__or__)
_UNTAGGED = (aten._to_copy, aten.where, aten.__and__, aten.__or__)  # pointwise operators without torch's tag
Bounds = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Block:
    """Rows [top, bottom) and columns [left, right) of a mask."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def above(self) -> bool:
        """Whether all of it lies above the diagonal."""
        return self.left >= self.bottom

    @property
    def below(self) -> bool:
        """Whether all of it lies below the diagonal."""
        return self.right <= self.top

    @property
    def turned(self) -> Block:
        return Block(self.left, self.right, self.top, self.bottom)

    def moved(self, rows: int, columns: int) -> Block:
        return Block(self.top + rows, self.bottom + rows, self.left + columns, self.right + columns)

    def parts(self) -> list[Block]:
        rows, columns = (self.top + self.bottom) // 2, (self.left + self.right) // 2
        return [
            Block(a, b, c, d)
            for a, b in ((self.top, rows), (rows, self.bottom))
            for c, d in ((self.left, columns), (columns, self.right))
            if a < b and c < d
        ]


class Unknown(Exception):
    """The value of a mask depends on more than positions, or by an operator that is not known here."""


class MaskBlocks:
    """Blocks of one mask. ``whole``: the value of a small node, None if it is not known."""

    def __init__(self, mask: Node, whole: Callable[[Node], Tensor | None]) -> None:
        self.mask, self.whole = mask, whole
        self.values: dict[Node, Tensor | None] = {}

    def all(
        self, decided: Callable[[Block, Tensor, Tensor], bool | None], test: Callable[[Block, Tensor], bool]
    ) -> bool:
        """Whether every block passes. ``decided``: of the bounds of a block, None where they do not say; ``test``: of
        the values of a small block."""
        rows, columns = shape_of(self.mask)[-2:]
        queue = [Block(0, rows, 0, columns)]
        try:
            while queue:
                block = queue.pop()
                found = decided(block, *self.bounds(self.mask, block))
                if found is False:
                    return False
                if found is None and max(block.bottom - block.top, block.right - block.left) <= _LEAF:
                    if not test(block, self.entries(self.mask, block)):
                        return False
                elif found is None:
                    queue += block.parts()
        except Unknown:
            return False
        return True

    # --- values -------------------------------------------------------------------------------------------

    def entries(self, node: Node, block: Block) -> Tensor:
        """The values of a block, [.., rows|1, columns|1]."""
        if (x := self._known(node)) is not None:
            return _part(x, block)
        if node.target in FILL_VALUES:
            return torch.full((1, 1), FILL_VALUES[node.target](node), dtype=value_of(node).dtype)
        if calls(node, aten.tril.default, aten.triu.default):
            k = arguments(node)["diagonal"] + block.top - block.left
            x = self.entries(operand(node), block)
            x = x.expand(*x.shape[:-2], block.bottom - block.top, block.right - block.left)
            return node.target(x, k)  # type: ignore[operator]
        if (moved := self._moved(node, block)) is not None:
            return self._shaped(node, self.entries(*moved))
        if not _is_pointwise(node):
            raise Unknown
        args, kwargs = map_arg((node.args, node.kwargs), lambda x: self.entries(x, block))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _known(self, node: Node) -> Tensor | None:
        """The value of a small node, or of a constant."""
        if node not in self.values:
            given = node.meta.get("value") if node.op == "placeholder" else None
            self.values[node] = given if isinstance(given, Tensor) else self.whole(node)
        if self.values[node] is None and node.op != "call_function":
            raise Unknown
        return self.values[node]

    def _moved(self, node: Node, block: Block) -> tuple[Node, Block] | None:
        """Where the entries of a view lie in its operand."""
        if calls(node, *_ALIKE):
            return operand(node), block
        if calls(node, *_LEADING):
            if shape_of(node)[-2:] != shape_of(operand(node))[-2:]:
                raise Unknown
            return operand(node), block
        if calls(node, aten.transpose.int, aten.t.default):
            known, rank = arguments(node), len(shape_of(node))
            if {known.get("dim0", 0) % rank, known.get("dim1", 1) % rank} != {rank - 2, rank - 1}:
                raise Unknown
            return operand(node), block.turned
        if calls(node, aten.slice.Tensor):
            known, rank = arguments(node), len(shape_of(node))
            dim, start = (known["dim"] or 0) % rank, known["start"] or 0
            if (known["step"] or 1) != 1 or dim < rank - 2:
                raise Unknown
            start = max(start + shape_of(operand(node))[dim], 0) if start < 0 else start
            return operand(node), block.moved(start * (dim == rank - 2), start * (dim == rank - 1))
        return None

    @staticmethod
    def _shaped(node: Node, x: Tensor) -> Tensor:
        """The entries of a view, from those of its operand."""
        if calls(node, aten.transpose.int, aten.t.default):
            return x.transpose(-1, -2)
        if not calls(node, *_LEADING):
            return x
        before, after = shape_of(operand(node))[:-2], shape_of(node)[:-2]
        return x.expand(*before, *x.shape[-2:]).reshape(*after, *x.shape[-2:])

    # --- bounds -------------------------------------------------------------------------------------------

    def bounds(self, node: Node, block: Block) -> Bounds:
        """The least and the largest value of a block, or numbers beyond them, [.., 1, 1] each."""
        if (x := self._known(node)) is not None:
            part = _part(x, block).double()
            return (part, part) if part.dim() < 1 else (_reduced(part, torch.amin), _reduced(part, torch.amax))
        if node.target in FILL_VALUES:
            x = torch.full((1, 1), float(FILL_VALUES[node.target](node)), dtype=torch.float64)
            return x, x
        if calls(node, aten.tril.default, aten.triu.default):
            return self._of_triangle(node, block)
        if (moved := self._moved(node, block)) is not None:
            low, high = self.bounds(*moved)
            return self._shaped(node, low), self._shaped(node, high)
        low, high = self._of_operator(node, block)
        if bool(low.isnan().any() | high.isnan().any()):
            raise Unknown
        return low, high

    def _of_triangle(self, node: Node, block: Block) -> Bounds:
        """Of tril and triu: those of the operand where all of the block is kept, 0 where none is."""
        low, high = self.bounds(operand(node), block)
        k = arguments(node)["diagonal"]
        first, last = block.left - (block.bottom - 1) - k, block.right - 1 - block.top - k  # of column - row - k
        kept, none = (last <= 0, first > 0) if calls(node, aten.tril.default) else (first >= 0, last < 0)
        if kept:
            return low, high
        return (torch.zeros_like(low),) * 2 if none else (low.clamp(max=0), high.clamp(min=0))

    def _of_operator(self, node: Node, block: Block) -> Bounds:
        packet = getattr(node.target, "overloadpacket", None)
        known = arguments(node) if isinstance(node.target, OpOverload) else {}

        def of(x: Any) -> Bounds:
            if isinstance(x, Node):
                return self.bounds(x, block)
            if not isinstance(x, (int, float)):
                raise Unknown
            number = torch.full((1, 1), float(x), dtype=torch.float64)
            return number, number

        if packet in _DIFFERENCES:
            (a, b), (c, d) = of(known["self"]), of(known["other"])
            if bool((a - d).isnan().any() | (b - c).isnan().any()):
                raise Unknown
            sure, possible = _DIFFERENCES[packet](a - d, b - c)
            return sure.double(), possible.double()
        if packet in (aten.logical_not, aten.bitwise_not) and value_of(node).dtype == torch.bool:
            low, high = of(known["self"])
            return 1 - (high != 0).double(), 1 - (low != 0).double()
        if packet in (*_AND, *_OR) and value_of(node).dtype == torch.bool:
            (a, b), (c, d) = of(known["self"]), of(known["other"])
            choose = torch.minimum if packet in _AND else torch.maximum
            return choose(a, c), choose(b, d)
        if packet in (aten.add, aten.sub, aten.rsub) and known["alpha"] == 1:
            (a, b), (c, d) = of(known["self"]), of(known["other"])
            if packet is aten.add:
                return a + c, b + d
            return (a - d, b - c) if packet is aten.sub else (c - b, d - a)
        if packet is aten.mul:
            (a, b), (c, d) = of(known["self"]), of(known["other"])
            corners = torch.stack(torch.broadcast_tensors(a * c, a * d, b * c, b * d))
            return corners.amin(0), corners.amax(0)
        if packet is aten.neg:
            low, high = of(known["self"])
            return -high, -low
        if packet is aten.where:
            return _chosen(of(known["condition"]), of(known["self"]), of(known["other"]))
        if packet is aten.masked_fill:
            return _chosen(of(known["mask"]), of(known["value"]), of(known["self"]))
        if packet is aten._to_copy:
            low, high = of(known["self"])
            if value_of(node).dtype == torch.bool:
                sure = (low > 0) | (high < 0)
                return sure.double(), ((low != 0) | (high != 0)).double()
            if value_of(operand(node)).is_floating_point() and not value_of(node).is_floating_point():
                raise Unknown
            return low, high
        raise Unknown


def triangle_in_blocks(
    mask: Node, least: float, whole: Callable[[Node], Tensor | None], keep: bool = True
) -> float | None:
    """For a mask [.., n, m] that says j <= i and nothing else: the largest number above the diagonal, which is at most
    ``least``; -inf if it is bool. None for any other mask. ``keep``: what a bool mask says of keys that are seen."""
    said = value_of(mask).dtype == torch.bool
    shown, limit, numbers = float(keep) if said else 0.0, least, [float("-inf")]

    def hidden(low: Tensor, high: Tensor) -> bool:
        if said:
            return bool(((low == 1 - shown) & (high == 1 - shown)).all())
        if (found := float(high.max())) <= limit:
            numbers.append(found)
        return found <= limit

    def decided(block: Block, low: Tensor, high: Tensor) -> bool | None:
        if block.above:
            return True if hidden(low, high) else None
        return True if block.below and bool(((low == shown) & (high == shown)).all()) else None

    def test(block: Block, x: Tensor) -> bool:
        later = _later(block)
        x = x.double().expand(*x.shape[:-2], *later.shape)
        above = x[..., later]
        return bool((x[..., ~later] == shown).all()) and (not above.numel() or hidden(above, above))

    return max(numbers) if MaskBlocks(mask, whole).all(decided, test) else None


def hides_later_in_blocks(bias: Node, least: float, whole: Callable[[Node], Tensor | None]) -> bool:
    """Whether a bias [.., n, n] hides all keys above the diagonal, and none on it."""

    def decided(block: Block, low: Tensor, high: Tensor) -> bool | None:
        if block.above:
            return True if bool((high <= least).all()) else None
        return True if block.below else None

    def test(block: Block, x: Tensor) -> bool:
        later = _later(block)
        x = x.double().expand(*x.shape[:-2], *later.shape)
        own = torch.arange(block.top, block.bottom)[:, None] == torch.arange(block.left, block.right)
        return bool((x[..., later] <= least).all() and (x[..., own] > least / 2).all())

    return MaskBlocks(bias, whole).all(decided, test)


def _later(block: Block) -> Tensor:
    return torch.arange(block.top, block.bottom)[:, None] < torch.arange(block.left, block.right)


def _chosen(condition: Bounds, yes: Bounds, no: Bounds) -> Bounds:
    never, always = condition[1] == 0, condition[0] != 0
    low = torch.where(always, yes[0], torch.where(never, no[0], torch.minimum(yes[0], no[0])))
    high = torch.where(always, yes[1], torch.where(never, no[1], torch.maximum(yes[1], no[1])))
    return low, high


def _part(x: Tensor, block: Block) -> Tensor:
    """The entries of a block in a value of any rank, whose dims of size 1 broadcast."""
    if x.dim() > 1 and x.shape[-2] > 1:
        x = x[..., block.top : block.bottom, :]
    return x[..., block.left : block.right] if x.dim() and x.shape[-1] > 1 else x


def _reduced(x: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    return reduce(x, dim=tuple(range(max(-2, -x.dim()), 0)), keepdim=True)


def _is_pointwise(node: Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or target.overloadpacket in _UNTAGGED)

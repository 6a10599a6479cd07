"""slice_sizes: one set of graphs for slices of any length.

A graph of the slice [c, c + l) differs from that of another slice in some integers only: sizes, and where rows begin.
Each is an affine function of l and c. So four graphs, built for four slices, become one. Three of them give

    n(l, c) = a + b l + d c          from (l1, c1), (l2, c1), (l1, c2)

The fourth confirms it, and the graph computes its integers from two further inputs, ``slice_length`` and
``slice_start``. They are Python ints; the tensors' shapes follow.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from torch.fx import Graph, GraphModule, Node

from autopar.adapters.fx.graph_nodes import new_node
from autopar.adapters.fx.lazy import graph_module
from autopar.ir.graph import add_placeholder, describe, insert_call
from autopar.ir.mesh import TokenSlice
from autopar.ops.traits import COLLECTIVES, LOCAL

LENGTH, START = "slice_length", "slice_start"

_SAMPLES = (  # (length, start) of four slices, and the least number of tokens
    (12, ((5, 4), (7, 4), (5, 6), (3, 9))),
    (9, ((3, 2), (5, 2), (3, 4), (2, 6))),
    (5, ((2, 1), (3, 1), (2, 2), (3, 2))),
)


def sample_slices(total: int, unit: int = 1) -> tuple[TokenSlice, ...]:
    """Four slices of ``total`` tokens that determine all others; lengths and starts are multiples of ``unit``.

    Raises ValueError when the sequence is too short for distinguishable sizes.
    """
    steps, least = total // unit, 9 if unit == 1 else 5  # a single row is a dim of size 1: it broadcasts
    if steps < least or total % unit:
        raise ValueError(
            f"token_slices: slices need a sequence of at least {least * unit} tokens, a multiple of {unit}, found "
            f"{total}; use a longer sequence or a schedule without token slices"
        )
    pairs = next(pairs for count, pairs in _SAMPLES if steps >= count)
    return tuple(TokenSlice(length * unit, start * unit, total) for length, start in pairs)


def symbolic(graphs: Sequence[GraphModule], slices: Sequence[TokenSlice]) -> GraphModule:
    """The graph for every slice, from the graphs of ``slices`` (those of `sample_slices`, in order).

    It takes their inputs, then ``slice_length`` and ``slice_start``. Metadata are those of the first.
    Raises ValueError when graphs differ in more than affine sizes.
    """
    assert len(graphs) == len(slices) == 4
    nodes = [list(gm.graph.nodes) for gm in graphs]
    if len({len(n) for n in nodes}) != 1:
        raise ValueError(_refusal(f"their graphs have {[len(n) for n in nodes]} nodes"))
    return _Merge(graphs[0], slices).run(list(zip(*nodes, strict=True)))


def _refusal(why: str) -> str:
    return f"token_slices: slices of different lengths compute differently: {why}; use a schedule without token slices"


def _ratio(blocks: Sequence[int]) -> tuple[int, ...]:
    """The ratio of the blocks of a dim in a collective, in the smallest integers."""
    unit = math.gcd(*blocks)
    return tuple(b // unit for b in blocks) if unit else ()


class _Merge:
    def __init__(self, first: GraphModule, slices: Sequence[TokenSlice]) -> None:
        self.first, self.slices = first, slices
        self.graph = Graph()
        self.copies: dict[tuple[Node, ...], Node] = {}
        self.sizes: dict[tuple[int, ...], Node] = {}

    def run(self, rows: list[tuple[Node, ...]]) -> GraphModule:
        for row in (r for r in rows if r[0].op == "placeholder"):
            self._same(row, [n.op for n in row])
            self.copies[row] = add_placeholder(self.graph, row[0].name, like=row[0])
        self.inputs = [add_placeholder(self.graph, name) for name in (LENGTH, START)]
        for node, value in zip(self.inputs, (self.slices[0].length, self.slices[0].start), strict=True):
            node.meta = {"val": value, "has_gradient": False}
        self.end = self.inputs[-1]
        for row in (r for r in rows if r[0].op != "placeholder"):
            self._same(row, [(n.op, n.target, tuple(n.kwargs)) for n in row])
            args = self._leaf(row, tuple(n.args for n in row))
            kwargs = self._leaf(row, tuple(n.kwargs for n in row))
            new = new_node(self.graph, row[0].op, row[0].target, args, kwargs, row[0].name)
            new.meta = dict(row[0].meta)
            self.copies[row] = new
        merged = graph_module(self.graph, type(self.first).__name__, self.first)
        merged.meta = dict(self.first.meta)
        return merged

    def _same(self, row: tuple[Node, ...], found: list[Any]) -> None:
        if any(f != found[0] for f in found):
            raise ValueError(
                _refusal(f"{describe(row[0])} is {describe(next(n for n in row if n.name != row[0].name))}")
            )

    def _leaf(self, row: tuple[Node, ...], values: tuple[Any, ...]) -> Any:
        """One argument of the merged node, from the arguments of the four."""
        first = values[0]
        if isinstance(first, Node):
            if values not in self.copies:
                raise ValueError(_refusal(f"{describe(row[0])} has different operands"))
            return self.copies[values]
        blocks = row[0].target in (*COLLECTIVES, *LOCAL) and isinstance(first, list)
        if blocks and len({_ratio(v) for v in values}) == 1:
            return first if all(v == first for v in values) else list(_ratio(first))
        if isinstance(first, (list, tuple)) and all(
            isinstance(v, (list, tuple)) and len(v) == len(first) for v in values
        ):
            return type(first)(self._leaf(row, v) for v in zip(*values, strict=True))
        if isinstance(first, dict) and all(isinstance(v, dict) and v.keys() == first.keys() for v in values):
            return {k: self._leaf(row, tuple(v[k] for v in values)) for k in first}
        if all(type(v) is type(first) and v == first for v in values):
            return first
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            raise ValueError(_refusal(f"{describe(row[0])} has arguments {list(values)}"))
        return self._size(row[0], values)

    def _size(self, node: Node, values: tuple[int, ...]) -> Node:
        """The node that computes an integer: (A + B l + D c) // Q."""
        (l1, c1), (l2, _), (_, c2), (l4, c4) = ((s.length, s.start) for s in self.slices)
        b, d = Fraction(values[1] - values[0], l2 - l1), Fraction(values[2] - values[0], c2 - c1)
        a = values[0] - b * l1 - d * c1
        if a + b * l4 + d * c4 != values[3]:
            raise ValueError(_refusal(f"{describe(node)} has sizes {list(values)}, no affine function of the length"))
        q = math.lcm(a.denominator, b.denominator, d.denominator)
        key = (int(a * q), int(b * q), int(d * q), q)
        if key not in self.sizes:
            self.sizes[key] = self._compute(*key)
        return self.sizes[key]

    def _compute(self, a: int, b: int, d: int, q: int) -> Node:
        total: Node | None = None
        for factor, x in zip((b, d), self.inputs, strict=True):
            if factor:
                term = x if factor == 1 else self._int(operator.mul, x, factor)
                total = term if total is None else self._int(operator.add, total, term)
        assert total is not None
        if a:
            total = self._int(operator.add, total, a)
        return total if q == 1 else self._int(operator.floordiv, total, q)

    def _int(self, target: Callable[..., Any], *args: Any) -> Node:
        self.end = insert_call(self.end.next, target, args, like=self.end)
        return self.end

"""Rows of one expert after another, as DeepSpeed-MoE writes them: each expert computes its piece of one value.

    rows = einsum("sec,sm->ecm", dispatch, x)
    y = cat([expert(c) for expert, c in zip(experts, rows.chunk(E))])
        -->
    t, order, offsets = moe_dispatch(rows as [E * C, M], [[0], .., [0], [1], .., [E - 1]], E)
    y = moe_combine(mlps(t, offsets), order, ones)

The rows that a rank of the axis of experts is given by the product are those of its own experts.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import ancestors, reach
from autopar.ir.meta import input_specs
from autopar.ops.traits import PRODUCTS, is_elementwise
from autopar.passes.canonicalize.experts.expert_loops import SAME, NotGrouped, Numbers
from autopar.passes.canonicalize.experts.expert_rows import GroupedRows, Rows, Shared, Value, place_of
from autopar.rewrite.build import Build, calls, shape_of, value_of

aten, ours = torch.ops.aten, torch.ops.autopar
_JOINS = (aten.cat.default, aten.stack.default)
_LAYOUTS = (*SAME, aten.permute.default, aten.transpose.int, aten.contiguous.default, aten._to_copy.default)
_ROWWISE = (aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default, *SAME)


@dataclass(frozen=True)
class ExpertList:
    """``pieces`` of ``source`` along ``dim``, one after the other, and the call that joins what is made of them."""

    source: Node
    dim: int
    pieces: tuple[Node, ...]
    join: Node


def expert_lists(gm: GraphModule) -> list[ExpertList]:
    """The lists of a graph, over at least two pieces of a product of activations."""
    found = []
    groups = [(source, dim, pieces) for source, dim, pieces in _pieces(gm) if _is_dispatched(gm, source)]
    for join in gm.graph.nodes if groups else ():
        for source, dim, pieces in groups:
            if calls(join, *_JOINS) and _one_each(join.args[0], pieces):
                found.append(ExpertList(source, dim, pieces, join))
    return found


def grouped_list(one: ExpertList) -> None:
    """Replace a list. Raises NotGrouped, and leaves the graph as it was, but for dead code."""
    _ListedRows(one).replace()


def _pieces(gm: GraphModule) -> list[tuple[Node, int, tuple[Node, ...]]]:
    """(value, dim, pieces) of all values of which there are equal pieces that cover a dim."""
    found: dict[tuple[Node, int, int], dict[int, Node]] = {}
    for node in gm.graph.nodes:
        at = place_of(node)
        if at is not None and at[3]:
            source, dim, start, length = at
            found.setdefault((source, dim, length), {}).setdefault(start, node)
    whole = []
    for (source, dim, length), pieces in found.items():
        starts = range(0, shape_of(source)[dim], length)
        if len(pieces) > 1 and sorted(pieces) == [*starts] and dim < len(shape_of(source)) - 1:
            whole.append((source, dim, tuple(pieces[start] for start in starts)))
    return whole


def _is_dispatched(gm: GraphModule, x: Node) -> bool:
    """Whether a value is a view of a product of activations."""
    while calls(x, *_LAYOUTS):
        x = x.args[0]  # type: ignore[assignment]
    if not calls(x, *PRODUCTS, aten.einsum.default):
        return False
    batch = {name for name, spec in input_specs(gm).items() if spec.kind == "input"}
    return all(any(y.name in batch for y in ancestors([operand])) for operand in x.all_input_nodes)


def _one_each(made: Sequence[Node], pieces: Sequence[Node]) -> bool:
    """Whether each of several values depends on its own piece alone."""
    every = set(pieces)
    if len(made) != len(pieces):
        return False
    behind = ({x for x in reach([m], lambda x: () if x in every else x.all_input_nodes) if x in every} for m in made)
    return all(found == {piece} for found, piece in zip(behind, pieces, strict=True))


class _ListedRows(GroupedRows):
    """All pieces as rows [E * n, width], in order."""

    def __init__(self, one: ExpertList) -> None:
        self.one, self.number, self.known = one, Numbers(), {}
        self.build, self.turns = Build(one.join), one.pieces
        self.shape = shape_of(one.pieces[0])
        self.rows = prod(self.shape[:-1])  # of each

    def replace(self) -> None:
        """Raises NotGrouped."""
        experts, source, build = len(self.one.pieces), self.one.source, self.build
        each = build(aten.arange.default, experts, dtype=torch.int64, device=value_of(source).device)
        expert = build(aten.expand.default, build.reshape(each, (experts, 1)), [experts, self.rows])
        made = build(ours.moe_dispatch.default, self._all(), build.reshape(expert, (experts * self.rows, 1)), experts)
        rows, order, self.offsets = (build(operator.getitem, made, i) for i in range(3))
        self.sorted = self.number(self.one.source), rows, order
        value = self._lifted(tuple(self.one.join.args[0]))  # type: ignore[arg-type]
        if not isinstance(value, Rows) or value.node is rows:
            raise NotGrouped("its experts have no weights")
        ones = build(aten.new_ones.default, rows, [experts * self.rows, 1])
        total = self._joined(build(ours.moe_combine.default, value.node, order, ones))
        self.one.join.replace_all_uses_with(total, propagate_meta=False)

    def _all(self) -> Node:
        """[E * n, width]"""
        source, dim, experts = self.one.source, self.one.dim, len(self.one.pieces)
        sizes = list(shape_of(source))
        sizes[dim : dim + 1] = [experts, sizes[dim] // experts]
        order = [dim, *(d for d in range(len(sizes)) if d != dim)]
        apart = self.build(aten.permute.default, self.build(aten.reshape.default, source, sizes), order)
        return self.build(aten.reshape.default, apart, [experts * self.rows, sizes[-1]])

    def _joined(self, rows: Node) -> Node:
        """What all experts made, [E * n, width], as the call joins it."""
        join = self.one.join
        sizes = list(shape_of(join.args[0][0]))  # type: ignore[index, arg-type]
        if prod(sizes[:-1]) != self.rows or sizes[-1] != shape_of(rows)[-1]:
            raise NotGrouped("its experts make another number of rows")
        dims = len(sizes) + (join.target is aten.stack.default)
        dim = int(join.args[1] if len(join.args) > 1 else 0) % dims  # type: ignore[arg-type]
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(sizes) + 1)]
        apart = self.build(aten.reshape.default, rows, [len(self.one.pieces), *sizes])
        joined = self.build(aten.permute.default, apart, order)
        return self.build(aten.reshape.default, joined, list(shape_of(join)))

    def _found(self, nodes: tuple[Node, ...]) -> Value:
        if nodes == self.one.pieces:
            assert self.sorted is not None
            return Rows(self.sorted[1])
        return super()._found(nodes)

    def _is_input(self, node: Node, turn: Any) -> bool:
        return node is turn

    def _on_rows(self, node: Node, operands: list[Value]) -> Value:
        if not (calls(node, *_ROWWISE) or is_elementwise(node.target)):  # type: ignore[arg-type]
            raise NotGrouped(f"{node.target} may mix the rows of an expert")
        for x in operands:
            if isinstance(x, Shared) and prod(shape_of(x.node)[:-1]) > 1 and not calls(node, *_ROWWISE):
                raise NotGrouped(f"{node.name} has an operand for each row, the same for all experts")
        return super()._on_rows(node, operands)

    def _viewed(self, node: Node, x: Node) -> Node:
        if shape_of(node)[-1] != shape_of(x)[-1] or prod(shape_of(node)[:-1]) != self.rows:
            raise NotGrouped(f"{node.name} views rows in another way")
        return x

"""Tokens that are sorted by expert, for grouped products with offsets: the same dispatch and combine as of loops.

order = argsort(index.flatten());  offsets = cumsum(counts of index)
y = scatter_add(0, order // K, w[order] * grouped(x[order // K], weights, offsets))
    --> rows, order, offsets = moe_dispatch(x, index, E);  y = moe_combine(grouped_mm(rows, weights, offsets), order, w)
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.capture.branches.expert_masks import number_of_choice
from autopar.ir.graph import arguments, calls_of, is_call, reach
from autopar.ops import grouped_experts as grouped_experts  # registers the operators
from autopar.passes.canonicalize.experts.expert_loops import NotGrouped
from autopar.rewrite.build import Build, shape_of, value_of

aten, ours = torch.ops.aten, torch.ops.autopar
_PRODUCT = ours.grouped_mm_by_offsets.default
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
          aten.squeeze.dim, aten.flatten.using_ints)  # fmt: skip
_CASTS = (aten._to_copy.default, aten.to.dtype, aten.clone.default, aten.alias.default, aten.contiguous.default)
_SORTS = (aten.sort.default, aten.sort.stable)
_ARGSORTS = (aten.argsort.default, aten.argsort.stable)
_DETERMINISTIC = "torchtitan.deterministic_scatter_add.default"  # scatter_add along dim 0
_HALVES = (aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.Scalar)


def sorted_layers(graph: Graph) -> list[list[Node]]:
    """The grouped products of a graph, by their offsets."""
    found: dict[Node, list[Node]] = {}
    for node in calls_of(graph, _PRODUCT):
        found.setdefault(arguments(node)["offsets"], []).append(node)
    return list(found.values())


def dispatched(products: list[Node]) -> None:
    """Replace the sort of one layer. Raises NotGrouped."""
    _Sorted(products).replace()


def _behind(x: Any, *through: Any) -> Any:
    while isinstance(x, Node) and is_call(x, *through):
        x = x.args[0]
    return x


class _Sorted:
    def __init__(self, products: list[Node]) -> None:
        self.products = products
        self.experts = shape_of(arguments(products[0])["weight"])[0]
        sums = _behind(arguments(products[0])["offsets"], *_CASTS)
        if not is_call(sums, aten.cumsum.default):
            raise NotGrouped("its offsets are no sums of counts")
        index = self._counted(_behind(sums.args[0], *_CASTS))
        if index is None:
            raise NotGrouped("its offsets do not count the tokens of each expert")
        self.index = index
        self.pairs = prod(shape_of(index))
        graph = products[0].graph
        self.orders = {x for x in graph.nodes if self._is_order(x)}
        halves = [x for x in graph.nodes if is_call(x, *_HALVES) and _behind(x.args[0], *_VIEWS) in self.orders]
        self.tokens = {x: int(x.args[1]) for x in halves if isinstance(x.args[1], int)}

    def _counted(self, counts: Node) -> Node | None:
        """The index whose numbers are counted, one count per expert."""
        if is_call(counts, aten.histc.default):
            known = arguments(counts)
            exact = known["bins"] == self.experts and (known["min"], known["max"]) == (0, self.experts)
            return _behind(counts.args[0], *_VIEWS, *_CASTS) if exact else None
        if is_call(counts, aten.sum.dim_IntList) and shape_of(counts) == (self.experts,):
            return number_of_choice(counts.args[0], self.experts)
        return None

    def _is_order(self, x: Node) -> bool:
        of: Any = x
        if is_call(x, operator.getitem) and x.args[1] == 1 and is_call(x.args[0], *_SORTS):  # type: ignore[arg-type]
            of = x.args[0]
        elif not is_call(x, *_ARGSORTS):
            return False
        if arguments(of).get("descending"):
            return False
        flat = of.args[0]
        return len(shape_of(flat)) == 1 and _behind(flat, *_VIEWS, *_CASTS) is _behind(self.index, *_VIEWS, *_CASTS)

    def _source(self, node: Node) -> tuple[Node, int] | None:
        """(x, K) of x[order // K]; K = 1: of x[order]"""
        if is_call(node, aten.index.Tensor) and len(node.args[1]) == 1:  # type: ignore[arg-type]
            x, i = node.args[0], node.args[1][0]  # type: ignore[index]
        elif is_call(node, aten.index_select.default) and node.args[1] == 0:
            x, i = node.args[0], node.args[2]
        elif is_call(node, aten.gather.default) and node.args[1] == 0:
            x, i = node.args[0], _behind(node.args[2], aten.expand.default)
        else:
            return None
        every = self._every(i)
        return (x, every) if every else None  # type: ignore[return-value]

    def _every(self, i: Any) -> int:
        i = _behind(i, *_VIEWS)
        return 1 if i in self.orders else self.tokens.get(i, 0)

    def replace(self) -> None:
        first = self.products[0]
        before = reach([arguments(x)["rows"] for x in self.products], self._operands_of_rows)
        sources = [x for x in before if self._source(x) is not None and len(shape_of(x)) == 2 and shape_of(x)[1] > 1]
        if len(sources) != 1:
            raise NotGrouped("its rows are not tokens in the order of their experts")
        (source,) = sources
        x, every = self._source(source)  # type: ignore[misc]
        top = self.pairs // shape_of(x)[0]
        if self.pairs != shape_of(source)[0] or every != top:
            raise NotGrouped("its rows are not those of all tokens and their experts")
        scaled = self._scaled_before(source)
        ends = self._ends(scaled[0] if scaled else source)
        by_pair = scaled is not None or any(self._end(end)[2] == 1 < top for end in ends)
        build = Build(source if scaled is None else scaled[0], like=first)
        expert = build.reshape(self.index, (self.pairs, 1) if by_pair else (self.pairs // top, top))
        if by_pair and top > 1:
            wide = build(aten.unsqueeze.default, x, 1)
            x = build.reshape(build(aten.expand.default, wide, [-1, top, -1]), (self.pairs, shape_of(x)[1]))
        if scaled is not None:
            factor = build.cast(
                build.reshape(self._pairs(scaled[1], build), (self.pairs, 1)), value_of(scaled[1]).dtype
            )
            x = build.cast(build(aten.mul.Tensor, x, factor), value_of(scaled[0]).dtype)
        made = build(ours.moe_dispatch.default, x, expert, self.experts)
        rows, order, offsets = (build(operator.getitem, made, i) for i in range(3))
        (source if scaled is None else scaled[0]).replace_all_uses_with(rows, propagate_meta=False)
        for product in self.products:
            own, given = Build(product), arguments(product)
            new = own(ours.grouped_mm.default, given["rows"], given["weight"], offsets, True)
            product.replace_all_uses_with(new, propagate_meta=False)
        for end in ends:
            self._combine(end, order, expert, by_pair)

    def _operands_of_rows(self, node: Node) -> list[Node]:
        if self._source(node) is not None:
            return []
        return [x for x in node.all_input_nodes if shape_of_or(x)[:1] == (self.pairs,)]

    def _scaled_before(self, source: Node) -> tuple[Node, Node] | None:
        """(the product of rows with a factor of each, that factor), if experts compute with that alone"""
        users, x = list(source.users), source
        while len(users) == 1 and is_call(users[0], *_CASTS):
            x, users = users[0], list(users[0].users)
        if len(users) != 1 or not is_call(users[0], aten.mul.Tensor):
            return None
        other = users[0].args[1] if users[0].args[0] is x else users[0].args[0]
        factor = self._factor(other)
        if factor is None:
            return None
        made = users[0]
        while len(made.users) == 1 and is_call(next(iter(made.users)), *_CASTS):
            made = next(iter(made.users))
        return made, factor

    def _factor(self, x: Any) -> Node | None:
        """w[order], [n] or [n, 1], of a factor of each row"""
        inner = _behind(x, *_VIEWS, *_CASTS)
        if not isinstance(inner, Node) or self._source(inner) is None or prod(shape_of(inner)) != self.pairs:
            return None
        return inner if shape_of(x) == (self.pairs, 1) else None

    def _pairs(self, factor: Node, build: Build) -> Node:
        """w of w[order // K], one per pair"""
        w, every = self._source(factor)  # type: ignore[misc]
        if every > 1:
            w = build(aten.expand.default, build.reshape(w, (self.pairs // every, 1)), [-1, every])
        return build.reshape(w, (self.pairs,))

    def _ends(self, start: Node) -> list[Node]:
        """The calls that return rows to their tokens. Raises NotGrouped where rows go anywhere else."""
        ends: list[Node] = []
        rows = set(reach([start], lambda x: list(x.users)))
        seen, pending = {start}, list(start.users)
        while pending:
            x = pending.pop()
            if x in seen:
                continue
            seen.add(x)
            if is_call(x, aten.zeros_like.default, aten.empty_like.default, aten.new_zeros.default):
                continue
            if self._end(x) is not None and self._end(x)[1] in rows:
                ends.append(x)
                continue
            made = value_of_or(x)
            if x.op == "output" or made is None or made.shape[:1] != (self.pairs,):
                raise NotGrouped(f"rows in the order of experts are used by {x.name}")
            others = [y for y in x.all_input_nodes if y not in rows and x not in self.products]
            for y in others:
                if self._of_order(y) and not (is_call(x, aten.mul.Tensor) and self._factor(y) is not None):
                    raise NotGrouped(f"the order of rows is used by {x.name}")
            pending += list(x.users)
        if not ends:
            raise NotGrouped("its rows do not return to their tokens")
        return ends

    def _of_order(self, x: Node) -> bool:
        return any(y in self.orders for y in reach([x], lambda n: n.all_input_nodes))

    def _end(self, x: Node) -> Any:
        """(base, rows, K) of scatter_add, index_add, index_put at order // K; K = 1: at order"""
        found: Any = None
        if str(x.target) == _DETERMINISTIC:
            found = x.args[0], x.args[2], self._every(_behind(x.args[1], aten.expand.default))
        elif is_call(x, aten.scatter_add.default, aten.index_add.default) and x.args[1] == 0 and not x.kwargs:
            found = x.args[0], x.args[3], self._every(_behind(x.args[2], aten.expand.default, aten.repeat.default))
        elif is_call(x, aten.index_put.default) and len(x.args[1]) == 1:  # type: ignore[arg-type]
            adds = len(x.args) > 3 and bool(x.args[3])
            every = self._every(x.args[1][0])  # type: ignore[index]
            found = x.args[0], x.args[2], every if adds or every == 1 else 0
        if found is not None and found[2] and isinstance(found[1], Node):
            return found
        return None

    def _combine(self, end: Node, order: Node, expert: Node, by_pair: bool) -> None:
        base, rows, every = self._end(end)
        build, dtype = Build(end), value_of(end).dtype
        rows, weights = self._weighted(rows)
        shape = shape_of(expert)
        if weights is not None:
            weight = build.reshape(self._pairs(weights, build), shape)
        else:
            weight = build(aten.new_ones.default, rows, list(shape))
        total = build(ours.moe_combine.default, rows, order, weight)
        if by_pair and every > 1:
            total = build(aten.sum.dim_IntList, build.reshape(total, (self.pairs // every, every, -1)), [1])
        total = build.cast(total, dtype)
        if is_call(end, aten.index_put.default) and every == 1:
            end.replace_all_uses_with(build.reshape(total, shape_of(end)), propagate_meta=False)
            return
        made = build(aten.add.Tensor, base, build.reshape(total, shape_of(end)))
        end.replace_all_uses_with(made, propagate_meta=False)

    def _weighted(self, rows: Node) -> tuple[Node, Node | None]:
        """Rows before and the factor of a last product with a factor of each row."""
        x = _behind(rows, *_CASTS)
        if is_call(x, aten.mul.Tensor):
            for a, b in (x.args[:2], x.args[1::-1]):
                factor = self._factor(b)
                if factor is not None:
                    return a, factor
        return rows, None


def shape_of_or(x: Node) -> tuple[int, ...]:
    """The shape of a tensor; () for anything else."""
    made = value_of_or(x)
    return tuple(made.shape) if made is not None else ()


def value_of_or(x: Node) -> torch.Tensor | None:
    """The fake value of a node that returns one tensor."""
    made = x.meta.get("val")
    return made if isinstance(made, torch.Tensor) else None

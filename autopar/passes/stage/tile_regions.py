"""Regions of a local graph that compute every token by itself, and so can run tile by tile along the tokens.

    attention -> o_proj -> add -> norm -> gate, up -> silu, mul -> down -> add -> next layer
                 '------------- each row of the result from the same row -----------'

The rules of the operators say it: a dim of tokens is one factor, which a call neither contracts nor spans. Where a
product with a weight has rows, the dim is followed through the graph in both directions. A region is what is connected
within a layer, without what mixes tokens (attention, sums over tokens), chooses (the experts of a token: a second run
could answer otherwise) or exchanges with other ranks: each exchange remains one, of all tokens.

The experts of tokens are computed tile by tile as well, where every rank has all of them: a tile's rows are sorted
within the tile, so a region has all that uses them, from the dispatch to the combine.

A region is worth tiles if it has a product of a product (an MLP): what the first makes is wide and used nowhere else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.fx import GraphModule, Node

from autopar.adapters.operators import OpOverload, argument_defaults
from autopar.ir.custom_backward import inside_of
from autopar.ir.graph import arguments, getitem_index, is_call, layer_of, nbytes, reach, tensor_operands
from autopar.ir.meta import names_of_parameters
from autopar.ops.few_bits.scaled_experts import scaled_experts
from autopar.ops.few_bits.scaled_products import scaled_linear
from autopar.ops.gradient import OWN_BACKWARD, RESULT
from autopar.ops.traits import (
    COLLECTIVES,
    CONVOLUTIONS,
    COPIES,
    LOCAL,
    PRODUCTS,
    SIZED,
    SIZES,
    is_choice,
    is_random,
    is_view,
)
from autopar.rules import RULES, Call, Rule, RuleError
from autopar.rules.channel_regions import maker_of
from autopar.rules.derived import DerivedRule
from autopar.rules.known_rules import known_rule
from autopar.rules.rule import Cat, Dim, Dims, factors_of
from autopar.rules.special import LinkedRule

aten, ours = torch.ops.aten, torch.ops.autopar
DRAWS = (ours.dropout.default, ours.random.default)  # of global indices, which are sliced
SCALED = (scaled_linear, scaled_experts)
_PRODUCTS = PRODUCTS - CONVOLUTIONS | {*SCALED}
_APART = (OWN_BACKWARD, RESULT, *COLLECTIVES, *LOCAL, *COPIES)


@dataclass(frozen=True)
class TileRegion:
    """``calls``: in order. ``dims``: value -> its dim of tokens, for values inside and those that enter. ``tokens``:
    the size of these dims, or what it is a multiple of (the rows of experts). ``given``: values that enter and have
    tokens. ``made``: values that leave."""

    calls: tuple[Node, ...]
    dims: Mapping[Node, int]
    tokens: int
    given: tuple[Node, ...]
    made: tuple[Node, ...]

    @property
    def inner_bytes(self) -> int:
        """Bytes of the values that exist only inside."""
        leaving = set(self.made)
        return sum(nbytes(n) for n in self.calls if n not in leaving and not _shares(n))

    @property
    def outer_bytes(self) -> int:
        """Bytes of the values that enter and leave, which exist for all tokens."""
        return sum(map(nbytes, (*self.given, *self.made)))


def tile_regions(
    gm: GraphModule, part_of: Mapping[Node, int] | None = None, apart: Collection[Node] = ()
) -> list[TileRegion]:
    """The regions worth tiles, in order. ``part_of``: the pipeline stage of each node; none has nodes of several.
    ``apart``: calls that no region has."""
    return _Tokens(gm, part_of or {}, apart).regions()


def _shares(node: Node) -> bool:
    return is_view(node.target) or getitem_index(node) is not None


class _Tokens:
    """The values of a graph that have a dim of tokens, and the calls that treat each token alike."""

    def __init__(self, gm: GraphModule, part_of: Mapping[Node, int], apart: Collection[Node]) -> None:
        self.gm, self.part_of = gm, part_of
        self.rules: dict[Node, Rule | None] = {}
        self.dims: dict[Node, int] = {}
        self.apart = {*inside_of(gm.graph), *apart}
        self.counts: set[Node] = set()  # values that are an addend of each tile: rows of each expert
        parameters = names_of_parameters(gm)
        self.weights = {n for n in gm.graph.nodes if n.op == "placeholder" and n.name in parameters}
        for node in gm.graph.nodes:
            operands = node.all_input_nodes
            if node.op == "call_function" and operands and all(x in self.weights for x in operands):
                self.weights.add(node)
        for node in gm.graph.nodes:
            start, dim = self._start(node)
            if start is not None and start not in self.dims:
                self._spread(start, dim)

    def _start(self, node: Node) -> tuple[Node | None, int]:
        """A value with a dim of tokens: what goes to experts; of a product with a weight the largest dim that its rows
        have, of several the last."""
        if is_call(node, ours.moe_dispatch.default):
            return node.args[0], 0  # type: ignore[return-value]
        if node.target not in _PRODUCTS - {ours.grouped_mm.default, scaled_experts} or node in self.weights:
            return None, 0
        if not any(x in self.weights for x in node.all_input_nodes):
            return None, 0
        rows = node.meta["val"].shape[:-1]
        return (node, max(range(len(rows)), key=lambda d: (rows[d], d))) if max(rows, default=0) > 1 else (None, 0)

    # --- one call ------------------------------------------------------------------------------------------

    def rule(self, call: Node) -> Rule | None:
        """None for a call that no tile may have."""
        if call not in self.rules:
            self.rules[call] = self._rule(call)
        return self.rules[call]

    def _rule(self, call: Node) -> Rule | None:
        if call.op != "call_function" or call in self.apart or call in self.weights or call.target in _APART:
            return None
        scaled = is_call(call, *SCALED) and scales_by_token(call)
        if not (scaled or isinstance(call.target, OpOverload)) or "chunk" in call.meta or _draws_or_chooses(call):
            return None
        has_sizes = not scaled and not set(SIZES).isdisjoint(argument_defaults(call.target))
        if has_sizes and call.target not in (*SIZED, aten.split_with_sizes.default, *DRAWS):
            return None
        val = call.meta["val"]
        shapes = tuple(tuple(v.shape) for v in (val if isinstance(val, (tuple, list)) else [val]))
        seen = Call(call, lambda x: tuple(x.meta["val"].shape), shapes, axis="tile", relaxed=True)
        build, derived = RULES.get(call.target), call.meta.get("derived")
        try:
            if build is not None:
                return known_rule(build, seen)
            return derived.rule(seen) if isinstance(derived, DerivedRule) else None
        except (RuleError, LookupError, ValueError):
            return None

    def values(self, call: Node, rule: Rule) -> Iterator[tuple[Node, Dims | None]]:
        """The operands and used results of a call, each with its factors."""
        yield from zip(tensor_operands(call), rule.operands, strict=True)
        if not isinstance(call.meta["val"], (tuple, list)):
            yield call, rule.results[0]
            return
        for user in call.users:
            index = getitem_index(user)
            if index is not None:
                yield user, rule.results[index]

    def dims_of(self, call: Node, rule: Rule, value: Node) -> dict[Node, int] | None:
        """The dims of tokens of a call's operands and results, if ``value`` has its own; None if the call does not
        treat every token by itself."""
        at = self.dims[value]
        outer = {_outer(dims[at]) for x, dims in self.values(call, rule) if x is value and dims is not None}
        factor = outer.pop() if len(outer) == 1 else ""
        linked = rule.linked if isinstance(rule, LinkedRule) else ()
        if not factor or factor in {*rule.blocked, *rule.absorbed, *rule.one_block, *rule.rows[1:], *linked}:
            return None
        whole = [dims for dims in rule.results if factor not in factors_of(dims)]
        if whole and not is_call(call, ours.moe_dispatch.default):
            return None
        found: dict[Node, int] = {}
        for x, dims in self.values(call, rule):
            if dims is not None and factor in factors_of(dims):
                place = next((d for d, dim in enumerate(dims) if _outer(dim) == factor), None)
                if place is None or found.setdefault(x, place) != place:
                    return None
            elif x in call.users:
                self.counts.add(x)
        adds = {x for i, x in enumerate(tensor_operands(call)) if rule.addends.get(i) == factor}
        return found if all((x in adds) == (x in self.counts) for x in tensor_operands(call)) else None

    def _spread(self, start: Node, dim: int) -> None:
        self.dims[start] = dim
        queue = deque([start])
        while queue:
            value = queue.popleft()
            for call in (maker_of(value), *value.users):
                rule = self.rule(call)
                found = self.dims_of(call, rule, value) if rule is not None else None
                for x, at in (found or {}).items():
                    if x not in self.dims and x not in self.weights:
                        self.dims[x] = at
                        queue.append(x)

    @cached_property
    def members(self) -> dict[Node, dict[Node, int]]:
        """Calls that compute every token by itself -> the dims of tokens of their operands and results."""
        found: dict[Node, dict[Node, int]] = {}
        for call in self.gm.graph.nodes:
            if getitem_index(call) is None:
                dims = self._dims_of_member(call)
            else:  # an entry of a tuple goes with its call
                dims = {x: self.dims[x] for x in (call,) if x in self.dims} if call.args[0] in found else None
            if dims is not None:
                found[call] = dims
        return found

    def _dims_of_member(self, call: Node) -> dict[Node, int] | None:
        rule = self.rule(call)
        known = [x for x, dims in self.values(call, rule) if x in self.dims and dims is not None] if rule else []
        dims = self.dims_of(call, rule, known[0]) if rule is not None and known else None
        if dims is None:
            return None
        operands = tensor_operands(call)[:1] if call.target in DRAWS else tensor_operands(call)
        fit = all(self.dims.get(x, dims.get(x)) == dims.get(x) for x in operands)
        return dims if fit and all(dims.get(x) == self.dims.get(x) for x in self._results(call)) else None

    def _results(self, call: Node) -> list[Node]:
        """Those that have tokens."""
        results = [u for u in call.users if getitem_index(u) is not None]
        return [x for x in results or [call] if x not in self.counts]

    @cached_property
    def sorted_rows(self) -> set[Node]:
        """Values whose rows are sorted by expert, and numbers of these rows."""
        found: set[Node] = set()
        for node in self.gm.graph.nodes:
            sorts = is_call(node, ours.moe_dispatch.default) or any(x in found for x in node.all_input_nodes)
            if sorts and not is_call(node, ours.moe_combine.default):
                found.add(node)
        return found

    # --- regions -------------------------------------------------------------------------------------------

    def regions(self) -> list[TileRegion]:
        """Those worth tiles."""
        groups = [calls for calls in self._connected() if self._has_product_of_product(calls)]
        return [region for calls in groups if (region := self._region(calls)) is not None]

    def _connected(self) -> list[list[Node]]:
        """Groups of connected members with nothing in between that is not a member."""
        level: dict[Node, int] = {}
        group: dict[Node, list[Node]] = {}
        keys: dict[Node, tuple[str, int, int]] = {}
        for node in self.gm.graph.nodes:
            above = [x for x in node.all_input_nodes if x not in self.weights]
            here = layer_of(node), self.part_of.get(node, 0)
            if node not in self.members:
                level[node] = max((level[x] + (x in self.members) for x in above), default=0)
                continue
            level[node] = max((level[x] + (x in keys and keys[x][:2] != here) for x in above), default=0)
            keys[node] = *here, level[node]
            mine = [node]
            for x in above:
                if keys.get(x) == keys[node] and (other := group[x]) is not mine:
                    mine, other = (other, mine) if len(other) > len(mine) else (mine, other)
                    mine += other
                    group |= dict.fromkeys(other, mine)
            group[node] = mine
        order = {node: i for i, node in enumerate(self.gm.graph.nodes)}
        groups = {id(calls): calls for calls in group.values()}
        return [sorted(calls, key=order.__getitem__) for calls in groups.values()]

    def _has_product_of_product(self, calls: list[Node]) -> bool:
        mine = set(calls)
        products = [n for n in calls if n.target in _PRODUCTS]
        for product in products:
            behind = set(reach([product], lambda x: (u for u in x.users if u in mine)))
            if any(n in behind for n in products if n is not product):
                return True
        return False

    def _region(self, calls: list[Node]) -> TileRegion | None:
        """None where rows that are sorted within a tile enter or leave."""
        mine, dims = set(calls), dict[Node, int]()
        for call in calls:
            dims |= self.members[call]
        given = tuple(x for x in dims if x not in mine)
        made = tuple(n for n in calls if any(u not in mine for u in n.users))
        sizes = {n.meta["val"].shape[d] for n, d in dims.items()}
        if not self.sorted_rows.isdisjoint((*given, *made)) or any(size % min(sizes) for size in sizes):
            return None
        return TileRegion(tuple(calls), dims, min(sizes), given, made)


def scales_by_token(product: Node) -> bool:
    """Whether no scale of a product in few bits spans several tokens."""
    args = arguments(product)
    wide = args["wide_weight_gradient"] or (product.target is scaled_experts and args["scaling"] == "block")
    return bool(wide) and (product.target is scaled_experts or args["scaling"] in ("row", "block"))


def _draws_or_chooses(call: Node) -> bool:
    """Whether a second run could give another result. (The dispatch sorts by a choice that is made.)"""
    chooses = is_choice(call.target) and call.target is not ours.moe_dispatch.default
    return chooses or is_random(call.target)


def _outer(dim: Dim) -> str:
    """The factor whose entries are runs of a dim."""
    return "" if isinstance(dim, Cat) or not dim else dim[0]


def tile_sizes(tokens: int, count: int) -> list[int]:
    """Tokens of each tile; the last may have fewer."""
    size = math.ceil(tokens / count)
    return [min(size, tokens - start) for start in range(0, tokens, size)]

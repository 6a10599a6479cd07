"""Calls around an exchange of activations that compute each row by itself, and the same calls on chunks of the rows.

    mm -> view -> reduce_scatter -> add -> norm -> all_gather -> view -> mm
    '--------- before ---------'    '------------- behind -------------'

A row is an entry of the outermost dim: a sample of the batch, with all its tokens. The rules of the operators say which
calls treat rows alike: the outermost dim of each result is that of an operand, which the call neither contracts nor
spans. Going up from the exchange, a region has what nobody else uses, to the next products; going down, what leads to
the next products, other exchanges over tp included. Products end it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from autopar.adapters.operators import OpOverload, argument_defaults
from autopar.ir.graph import (
    arguments,
    getitem_index,
    insert_call,
    is_call,
    reach,
    run_fake,
    set_argument,
    shape,
    tensor_operands,
)
from autopar.ops.traits import COLLECTIVES, COPIES, LOCAL, SIZED, SIZES, is_choice, is_random, reads_in_kernel
from autopar.rules.call import Call
from autopar.rules.core import CORE
from autopar.rules.known_rules import known_rule
from autopar.rules.rule import Cat, Dims, Rule, RuleError, factors_of

aten, ours = torch.ops.aten, torch.ops.autopar
PRODUCTS = (aten.mm.default, aten.addmm.default)
EXCHANGES = (ours.all_gather.default, ours.reduce_scatter.default, ours.all_reduce.default)


@dataclass(frozen=True)
class RowRegion:
    """``before`` ends with the exchange. Both in order. rows: of which each value of the region has as many, or a
    multiple."""

    before: tuple[Node, ...]
    behind: tuple[Node, ...]
    rows: int

    @property
    def calls(self) -> tuple[Node, ...]:
        return self.before + self.behind

    @property
    def exchanges(self) -> list[Node]:
        return [node for node in self.calls if is_call(node, *EXCHANGES)]

    @property
    def parts(self) -> list[list[Node]]:
        """The calls up to each exchange, and what comes last."""
        found: list[list[Node]] = [[]]
        for call in self.calls:
            found[-1].append(call)
            if is_call(call, *EXCHANGES):
                found.append([])
        return found

    @property
    def made(self) -> list[Node]:
        """Values that others use."""
        inside = set(self.calls)
        return [node for node in self.calls if any(user not in inside for user in node.users)]


def exchanges_rows(node: Node) -> bool:
    """Whether a call moves activations over tp, each row by itself."""
    if not is_call(node, *EXCHANGES) or not node.users:
        return False
    given = arguments(node)
    apart = given["axis"] == "tp" and given.get("op", "sum") == "sum" and given.get("dim", 1) != 0
    return apart and len(shape(given["x"])) > 1


def row_region(exchange: Node, whole: bool = True) -> RowRegion | None:
    """That of a call that `exchanges_rows`; None without products. ``whole``: behind a reduction, too."""
    rows = shape(exchange)[0]
    if rows < 2:
        return None
    behind = _behind(exchange, rows) if whole or is_call(exchange, ours.all_gather.default) else ()
    found = RowRegion(_before(exchange, rows), behind, rows)
    return found if any(is_call(node, *PRODUCTS) for node in found.calls) else None


def _before(exchange: Node, rows: int) -> tuple[Node, ...]:
    """The exchange, and what leads from products to it and nowhere else."""
    inside, found, node = {exchange}, [exchange], exchange
    ahead = set(exchange.all_input_nodes)
    while (node := node.prev).op == "call_function" and ahead:
        if node not in ahead:
            continue
        ahead.discard(node)
        if not inside.issuperset(node.users) or row_operands(node, rows) is None:
            continue
        found.append(node)
        if not is_call(node, *PRODUCTS):
            inside.add(node)
            ahead.update(node.all_input_nodes)
    found.reverse()
    return _made_of_products(found)


def _made_of_products(calls: Sequence[Node]) -> tuple[Node, ...]:
    """The last call, and those that a product leads to."""
    found = {node for node in calls if is_call(node, *PRODUCTS)} | {calls[-1]}
    for node in calls:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return tuple(node for node in calls if node in found)


def _behind(exchange: Node, rows: int) -> tuple[Node, ...]:
    """What leads from the exchange to products, and needs nothing that others compute from the region."""
    inside, outside, found = {exchange}, set[Node](), list[Node]()
    left, node = set(exchange.users), exchange
    while (node := node.next).op != "output" and left:
        left.discard(node)
        operands = node.all_input_nodes
        if not outside.isdisjoint(operands):
            outside.add(node)
        elif not inside.isdisjoint(operands):
            if not _keeps_rows(node, inside, rows):
                outside.add(node)
                continue
            found.append(node)
            if is_call(node, *PRODUCTS):
                outside.add(node)
            else:
                inside.add(node)
                left.update(node.users)
    products = [node for node in found if is_call(node, *PRODUCTS)]
    leading = set(reach(products, lambda x: (y for y in x.all_input_nodes if y in inside)))
    return tuple(
        node for node in found if node in leading or (getitem_index(node) is not None and node.args[0] in leading)
    )


# --- one call ----------------------------------------------------------------------------------------------


def _keeps_rows(call: Node, having: set[Node], rows: int) -> bool:
    """Whether a call computes each row of these of its operands by itself."""
    operands = row_operands(call, rows)
    return operands is not None and having.intersection(call.all_input_nodes) <= set(operands)


def row_operands(call: Node, rows: int) -> list[Node] | None:
    """The operands whose outermost dim is that of all results of a call; None if it does not compute so many rows
    each by itself."""
    if getitem_index(call) is not None:
        (source,) = call.all_input_nodes
        return [source] if row_operands(source, rows) is not None else None
    if exchanges_rows(call):
        return [arguments(call)["x"]]
    rule = _rule(call)
    factors = {_outermost(dims) for dims in rule.results} if rule is not None else set()
    factor = factors.pop() if len(factors) == 1 else ""
    if rule is None or not factor or factor in {*rule.blocked, *rule.absorbed, *rule.one_block, *rule.rows}:
        return None
    operands = zip(tensor_operands(call), rule.operands, strict=True)
    found = [(x, dims) for x, dims in operands if dims is not None and factor in factors_of(dims)]
    apart = rule.sizes[factor] % rows == 0 and all(_outermost(dims) == factor for _, dims in found)
    return [x for x, _ in found] if found and apart else None


def _rule(call: Node) -> Rule | None:
    """None for calls that no chunk may have: what draws, chooses, communicates, or mixes rows in a way unknown."""
    target = call.target
    if not isinstance(target, OpOverload) or target not in CORE or not (reads_in_kernel(target) or target in PRODUCTS):
        return None
    if is_random(target) or is_choice(target) or target in (*COLLECTIVES, *LOCAL, *COPIES):
        return None
    sized = not set(SIZES).isdisjoint(argument_defaults(target))
    if sized and target not in (*SIZED, aten.split_with_sizes.default):
        return None
    val = call.meta["val"]
    results = val if isinstance(val, (tuple, list)) else [val]
    if any(result is None for result in results):  # of a backward, which leaves out what nobody asks for
        return None
    shapes = tuple(tuple(result.shape) for result in results)
    try:
        return known_rule(CORE[target], Call(call, shape, shapes, axis="tp", of_step=True))
    except (RuleError, LookupError, ValueError, ArithmeticError):  # rules for calls of the forward may not cover this
        return None


def _outermost(dims: Dims) -> str:
    """The factor whose entries are runs of the outermost dim."""
    return "" if not dims or isinstance(dims[0], Cat) or not dims[0] else dims[0][0]


# --- chunks ------------------------------------------------------------------------------------------------


def run_in_chunks(region: RowRegion, count: int) -> None:
    """Put ``count`` chunks of a region in its place: of all that is before the exchange, then of what is behind it.
    Other values that they use may be computed later in the graph, which is to be sorted."""
    _Chunks(region, count).rewrite()


class _Chunks:
    """copies: for each chunk, value -> its rows in the chunk."""

    def __init__(self, region: RowRegion, count: int) -> None:
        self.region, rows = region, region.rows
        self.sizes = [rows * (i + 1) // count - rows * i // count for i in range(count)]
        self.at = region.calls[-1]
        self.copies: list[dict[Node, Node]] = [{} for _ in self.sizes]
        self.values: dict[tuple[Node, int], Any] = {}  # (call, rows of a chunk) -> its value

    def rewrite(self) -> None:
        made, calls = self.region.made, self.region.calls
        self._split(x for call in calls for x in row_operands(call, self.region.rows) or () if x not in calls)
        parts = self.region.parts
        for number, part in _in_turns(len(self.sizes), len(parts)):
            copies = self.copies[number]
            for call in parts[part]:
                copies[call] = self._copy(call, copies, self.sizes[number])
        inside = set(calls)
        for x in made:
            chunks = [copies[x] for copies in self.copies]
            joined = insert_call(self.at, aten.cat.default, (chunks, 0), like=x, val=x.meta["val"])
            x.replace_all_uses_with(joined, delete_user_cb=lambda user: user not in inside)
        for call in reversed(calls):
            call.graph.erase_node(call)

    def _split(self, values: Iterable[Node]) -> None:
        for x in dict.fromkeys(values):
            sizes = [self._rows(x, size) for size in self.sizes]
            for copies, part in zip(self.copies, _joined_of(x, sizes) or self._parts(x, sizes), strict=True):
                copies[x] = part

    def _parts(self, x: Node, sizes: list[int]) -> list[Node]:
        parts = insert_call(self.at, aten.split_with_sizes.default, (x, sizes, 0), like=x)
        return [insert_call(self.at, operator.getitem, (parts, i), like=x) for i in range(len(sizes))]

    def _copy(self, call: Node, copies: dict[Node, Node], size: int) -> Node:
        args, kwargs = map_arg((call.args, call.kwargs), lambda x: copies.get(x, x))
        made = insert_call(self.at, call.target, args, kwargs, like=call, val=call.meta["val"])  # type: ignore[arg-type]
        if call.target in SIZED:
            set_argument(made, SIZED[call.target], [self._rows(call, size), *shape(call)[1:]])
        if (call, size) not in self.values:
            self.values[call, size] = run_fake(made.graph, made.target, made.args, made.kwargs)  # type: ignore[arg-type]
        made.meta["val"] = self.values[call, size]
        return made

    def _rows(self, x: Node, size: int) -> int:
        return size * shape(x)[0] // self.region.rows


def _in_turns(chunks: int, parts: int) -> list[tuple[int, int]]:
    """(chunk, part) in an order that has computation beside each transfer."""
    if parts < 3:
        return [(chunk, part) for part in range(parts) for chunk in range(chunks)]
    steps = range(chunks + parts - 1)
    return [(step - part, part) for step in steps for part in range(parts) if 0 <= step - part < chunks]


def _joined_of(x: Node, sizes: list[int]) -> list[Node]:
    """The chunks that a value is made of, if they have these sizes."""
    if not is_call(x, aten.cat.default):
        return []
    given = arguments(x)
    chunks: list[Node] = list(given["tensors"])
    return chunks if given["dim"] == 0 and [shape(chunk)[0] for chunk in chunks] == sizes else []

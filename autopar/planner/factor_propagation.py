"""Which dims must be sharded together: the closure of one sharded dim under "same factor", by dataflow alone.

Shard one dim of one weight. The rule of every operator that reads the sharded value says which other operands and
results have the same factor. They are sharded too, and so on until each path ends: in a contraction (the result is
Partial), in an operator that absorbs the factor (the loss), or at a value that depends on no parameter (slicing it is
free). A closure that reaches a dim that cannot be sharded is rejected, with the reason.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import describe, getitem_index, global_shape, is_call, nbytes, reach, tensor_operands, values
from autopar.ir.mesh import Mesh
from autopar.ir.meta import names_of_parameters
from autopar.ir.placement import Shard
from autopar.ops.traits import PRODUCTS
from autopar.rules import Cat, Cut, Indivisible, Rule, RuleError, has_rule, rule_of

# Slicing their result is free, and their operands stay replicated: kv heads repeated for more ranks than heads.
BOUNDARIES = (torch.ops.aten.repeat_interleave.self_int,)


class Rejected(Exception):
    """The dim cannot be sharded; ``blocks`` lists block structures that may make it possible. ``clash``: a value would
    be sharded in two ways, like the weight of a recurrence, whose product is multiplied by it once more. ``size``: what
    does not divide over the ranks, as heads or words."""

    def __init__(
        self, reason: str, blocks: list[tuple[int, ...]] | None = None, clash: bool = False, size: int = 0
    ) -> None:
        super().__init__(reason)
        self.blocks = blocks or []
        self.clash, self.size, self.sizes = clash, size, set[int]()


@dataclass
class Closure:
    """Everything that is sharded together with one weight's dim, and its traffic."""

    facts: dict[Node, Shard] = field(default_factory=dict)
    parameters: dict[Node, Shard] = field(default_factory=dict)
    contractions: dict[Node, int] = field(default_factory=dict)  # partial result -> its bytes
    absorbed: list[Node] = field(default_factory=list)
    entries: dict[Node, int] = field(default_factory=dict)  # replicated value that enters a sharded region -> bytes
    gathered: dict[Node, int] = field(default_factory=dict)  # sharded value that is gathered for a product -> bytes
    boundaries: list[Node] = field(default_factory=list)
    slices: dict[Node, Shard] = field(default_factory=dict)  # parts of replicated weights; each rank slices them
    products: int = 0  # multiplications that are sharded, in elements of weights

    @property
    def returns(self) -> bool:
        """Whether a partial result of the closure leads back into it: sharded and replicated would alternate (as for a
        residual stream sharded on its width). A pair of column and row is entered and left once."""
        return any(x in self.entries for x in reach(self.contractions, lambda node: node.users))

    @property
    def traffic(self) -> int:
        return sum(self.contractions.values()) + sum((self.entries | self.gathered).values())


@dataclass
class Analysis:
    """Facts about a graph that all closures share."""

    gm: GraphModule
    mesh: Mesh
    axis: str
    parameters: set[Node] = field(default_factory=set)
    from_parameter: set[Node] = field(default_factory=set)
    from_input: set[Node] = field(default_factory=set)
    rules: dict[Node, Rule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = names_of_parameters(self.gm)
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                if node.name in names:
                    self.parameters.add(node)
                    self.from_parameter.add(node)
                else:
                    self.from_input.add(node)
            elif node.op == "call_function":
                operands = tensor_operands(node)
                if any(x in self.from_parameter for x in operands):
                    self.from_parameter.add(node)
                if any(x in self.from_input for x in operands):
                    self.from_input.add(node)

    def rule(self, node: Node) -> Rule:
        if node not in self.rules:
            self.rules[node] = rule_of(node, self.axis, self.mesh, relaxed=True)
        return self.rules[node]

    @property
    def ranks(self) -> int:
        return self.mesh.size(self.axis)


def close_over(analysis: Analysis, parameter: Node, shard: Shard, gathering: bool = False) -> Closure:
    """The closure of sharding a parameter. ``gathering``: where a weight would contract a sharded value, the value is
    gathered instead (all-gather; reduce-scatter of its gradient), and the path ends. Raises Rejected."""
    search = _Search(analysis, Closure(), gathering)
    search.add(parameter, shard)
    search.run()
    closure = search.closure
    if not closure.contractions and not closure.absorbed and not closure.gathered:
        raise Rejected("nothing contracts it")
    return closure


def close_with_blocks(analysis: Analysis, parameter: Node, dim: int) -> Closure:
    """`close_over`, trying the block structures that the graph suggests (splits of fused projections). Gathers values
    only where nothing else works: where a weight multiplies its own result (a recurrence, a layer called in a loop)."""
    try:
        return _with_some_blocks(analysis, parameter, dim, gathering=False)
    except Rejected as rejected:
        if not rejected.clash:
            raise
        return _with_some_blocks(analysis, parameter, dim, gathering=True)


def _with_some_blocks(analysis: Analysis, parameter: Node, dim: int, gathering: bool) -> Closure:
    """What divides comes first; then sizes that were met and do not divide are tried as units, the largest first."""
    size = global_shape(parameter)[dim]
    found, met = _with_blocks(analysis, parameter, dim, gathering, 0), set[int]()
    first = found
    while isinstance(found, Rejected) and len(met) < 6:
        sizes = found.sizes - met
        if not sizes:
            break
        units = max(sizes)
        met.add(units)
        tried = _with_blocks(analysis, parameter, dim, gathering, units) if _pads(size, units, analysis.ranks) else None
        if isinstance(tried, Closure):
            return tried
        found.sizes |= tried.sizes if tried is not None else set()
    if isinstance(first, Rejected):
        raise first
    return first


def _pads(size: int, units: int, ranks: int) -> bool:
    """Whether a dim consists of such units, and shards of them are smaller than the whole."""
    return size % units == 0 and units % ranks != 0 and -(-units // ranks) < units


def _with_blocks(analysis: Analysis, parameter: Node, dim: int, gathering: bool, units: int) -> Closure | Rejected:
    size = global_shape(parameter)[dim]
    tried: list[tuple[int, ...]] = []
    waiting: list[tuple[int, ...]] = [()]
    first: Rejected | None = None
    sizes: set[int] = set()
    while waiting and len(tried) < 8:
        blocks = waiting.pop(0)
        tried.append(blocks)
        try:
            return close_over(analysis, parameter, Shard(dim, blocks, units=units), gathering)
        except Rejected as rejected:
            sizes |= {rejected.size} if rejected.size else set()
            first = rejected if first is None or first.blocks else first  # the last structure has the clearest reason
            for b in (_scaled(b, size) for b in rejected.blocks):
                if b and b not in tried and b not in waiting:
                    waiting.append(b)
    assert first is not None
    first.sizes = sizes
    return first


def _scaled(blocks: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Blocks found at another dim (heads) in units of this one (heads times width); () if they do not fit."""
    return tuple(b * (size // sum(blocks)) for b in blocks) if size % sum(blocks) == 0 else ()


class _Search:
    def __init__(self, analysis: Analysis, closure: Closure, gathering: bool) -> None:
        self.analysis, self.closure, self.gathering = analysis, closure, gathering
        self.queue: deque[Node] = deque()
        self.met: dict[tuple[Any, ...], list[Shard | None]] = {}  # call and sharded factors -> shards of its results

    def add(self, node: Node, shard: Shard) -> None:
        known = self.closure.facts.get(node)
        if known is not None:
            if known != shard:
                raise Rejected(f"{node.name} would be sharded both as {known} and as {shard}", clash=True)
            return
        self.closure.facts[node] = shard
        if node in self.analysis.parameters:
            self.closure.parameters[node] = shard
        self.queue.append(node)

    def run(self) -> None:
        while self.queue:
            node = self.queue.popleft()
            self._upstream(node)
            for user in list(node.users):
                if user.op == "output":
                    continue
                self._visit(user, operand=node)

    def _upstream(self, node: Node) -> None:
        if node.op == "placeholder":
            if node not in self.analysis.parameters:
                return  # an input: a slice of it is free when it has no gradient, and inputs have none
            return
        if node not in self.analysis.from_parameter:
            return  # a mask, a table: a slice of it is free
        if is_call(node, *BOUNDARIES):
            self.closure.boundaries.append(node)
            return
        if self._part_of_weight(node):
            self.closure.boundaries.append(node)
            self.closure.slices[node] = self.closure.facts[node]
            return
        index = getitem_index(node)
        if index is not None:
            self._visit(node.args[0], result=index, value=node)  # type: ignore[arg-type]
        else:
            self._visit(node, result=0, value=node)

    def _part_of_weight(self, node: Node) -> bool:
        """Whether this is a part of a fused weight whose other parts cannot be sharded with it: the weight is
        replicated, and each rank slices the part."""
        split = node.args[0] if getitem_index(node) is not None else None
        return (
            isinstance(split, Node)
            and is_call(split, torch.ops.aten.split_with_sizes.default)
            and split.args[0] in self.analysis.parameters
        )

    def _visit(
        self, call: Node, operand: Node | None = None, result: int | None = None, value: Node | None = None
    ) -> None:
        """Visit one operator that has a sharded operand or result."""
        if getitem_index(call) is not None:
            return  # handled with the operator that returns the tuple
        if not has_rule(call):
            raise Rejected(f"no rule for {describe(call)}")
        rule = self.analysis.rule(call)
        cut: Cut | None = None
        if operand is not None:
            for i, x in enumerate(tensor_operands(call)):
                dims = rule.operands[i]
                if x is operand and dims is not None:
                    cut = self._cut(rule, dims, self.closure.facts[operand], call)
            if cut is None:
                return  # only its shape matters
            if self.gathering and self._is_contracted(call, rule, cut):
                if operand not in self.analysis.from_input:
                    raise Rejected(f"{operand.name} would be sharded on the dim that it contracts, as a row")
                self.closure.gathered[operand] = nbytes(operand)
                return
        else:
            assert result is not None and value is not None
            cut = self._cut(rule, rule.results[result], self.closure.facts[value], call)
        self._spread(call, rule, cut)

    def _is_contracted(self, call: Node, rule: Rule, cut: Cut) -> bool:
        """Whether a weight contracts the sharded factor of a value."""
        if call.target not in PRODUCTS:
            return False
        operands, from_input = tensor_operands(call), self.analysis.from_input
        by_weight = not from_input.issuperset(operands) and not from_input.isdisjoint(operands)
        return by_weight and rule.shard_of(rule.results[0], cut) is None

    def _cut(self, rule: Rule, dims: tuple, shard: Shard, call: Node) -> Cut:  # type: ignore[type-arg]
        try:
            return rule.completed(rule.cut_of(dims, shard, self.analysis.ranks))
        except RuleError as error:
            size = error.size if isinstance(error, Indivisible) else 0
            raise Rejected(f"at {describe(call)}: {error}", suggestions(rule, dims, shard), size=size) from None

    def _spread(self, call: Node, rule: Rule, cut: Cut) -> None:
        key = (call, *sorted(cut.items()))
        if key in self.met:  # reached through another operand or result
            self._note(call, rule, cut, self.met[key])
            return
        try:
            operands = [None if d is None else rule.shard_of(d, cut) for d in rule.operands]
            results = [rule.shard_of(d, cut) for d in rule.results]
        except RuleError as error:
            raise Rejected(f"at {describe(call)}: {error}") from None
        self.met[key] = results
        nodes = tensor_operands(call)
        for x, shard, dims in zip(nodes, operands, rule.operands, strict=True):
            if shard is not None:
                self.add(x, shard)
            elif dims is not None and x in self.analysis.from_parameter and x not in self.analysis.parameters:
                if is_call(call, torch.ops.autopar.attention.default):
                    self.closure.boundaries.append(x)  # keys and values that all sharded query heads share
                else:
                    self.closure.entries[x] = nbytes(x)
        self._note(call, rule, cut, results)
        if isinstance(call.meta["val"], (list, tuple)):
            for user in call.users:
                index = getitem_index(user)
                if index is not None and results[index] is not None:
                    self.add(user, results[index])  # type: ignore[arg-type]
        elif results[0] is not None:
            self.add(call, results[0])

    def _note(self, call: Node, rule: Rule, cut: Cut, results: list[Shard | None]) -> None:
        if any(f in rule.absorbed for f in cut):
            self.closure.absorbed.append(call)
        elif results[0] is None and call not in self.closure.contractions:
            self.closure.contractions[call] = sum(v.numel() * v.dtype.itemsize for v in values(call))
        if call.target in PRODUCTS:
            weights = [x for x in tensor_operands(call) if x in self.analysis.from_parameter]
            self.closure.products += min((x.meta["val"].numel() for x in weights), default=0)


def suggestions(rule: Rule, dims: tuple, shard: Shard) -> list[tuple[int, ...]]:  # type: ignore[type-arg]
    """Block structures with which a dim could be sharded: its parts, or one of its minor factors."""
    dim = dims[shard.dim]
    if isinstance(dim, Cat):
        return [tuple(rule.sizes[p] for p in dim.parts)]
    found, outer = [], 1
    for i, factor in enumerate(dim):
        inner = 1
        for later in dim[i:]:
            inner *= rule.sizes[later]
        if outer > 1:
            found.append((inner,) * outer)
        outer *= rule.sizes[factor]
    return found

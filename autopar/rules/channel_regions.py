"""Regions of a graph that mix the tokens of a sharded sequence, and run on all tokens of some channels instead.

    x (tokens) -> in_proj -> conv1d -> scan over time -> gate -> out_proj -> y (tokens)
                            '---- all tokens of some heads ----'

A recurrence, a convolution along time, a shift or a cumulative sum cannot run on some of the tokens, but each of its
heads or channels is computed by itself. The rules of the operators show which dim that is: a *seed*, one dim of the
last value that mixes tokens, is followed through the region towards its inputs, then towards its users. So an
all-to-all in front gives every rank all tokens of its channels, and one behind gives it its tokens back.

Calls that can run either way (activations, views, splits) are on the side that makes the exchanges smallest: a minimum
cut, whose capacities are the bytes of a rank. A value that lacks the channels (B and C of one group of heads) is
gathered, and what repeats it for all heads runs whole.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch.fx import GraphModule, Node

from autopar.ir.custom_backward import inside_of
from autopar.ir.graph import getitem_index, nbytes, reach, shape_on, tensor_operands
from autopar.ir.mesh import Mesh
from autopar.ir.meta import input_specs, names_of_parameters
from autopar.ir.placement import Pieces, Shard, scaled_blocks, shard_of_size
from autopar.ops.gradient import OWN_BACKWARD, RESULT
from autopar.ops.traits import PRODUCTS
from autopar.plan import Stream
from autopar.rules import Cut, Rule, RuleError, has_rule, rule_of
from autopar.rules.along_tokens import rows_sent
from autopar.rules.rule import Dims
from autopar.rules.sequence_parallel import spread_label

_APART = (operator.getitem, OWN_BACKWARD, RESULT)  # placed with other calls
Seed = tuple[Node, Shard]  # a value, and the Shard on its channels


@dataclass
class Tokens:
    """A graph on an axis that shards tokens. ``labels``: the values with a dim of tokens, with the Shard on it."""

    gm: GraphModule
    labels: Mapping[Node, Shard]
    mesh: Mesh
    axis: str
    rules: dict[Node, Rule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """What a call mixes along a dim and keeps (a flip, a convolution with padding) are tokens on both sides."""
        labels, nodes = dict(self.labels), list(self.gm.graph.nodes) if self.labels else []
        for call in (*nodes, *reversed(nodes)):
            for value, label in self._kept(call, labels):
                if value not in labels:
                    found = spread_label(value, label, self.mesh, self.axis, barred=labels)
                    labels = {**found, **labels}
        self.labels = labels

    def _kept(self, call: Node, labels: Mapping[Node, Shard]) -> list[Seed]:
        """Values beside a call that have no label, but the shape of one beside it that has."""
        if call.op != "call_function" or isinstance(call.meta["val"], (list, tuple)) or call.target in _APART:
            return []
        shape = shape_on(call, self.axis, self.mesh)
        alike = [x for x in (call, *tensor_operands(call)) if x.op != "placeholder"]
        alike = [x for x in alike if shape_on(x, self.axis, self.mesh) == shape]
        known = next((labels[x] for x in alike if x in labels), None)
        return [(x, known) for x in alike if x not in labels] if known is not None else []

    def rule(self, call: Node) -> Rule:
        if call not in self.rules:
            self.rules[call] = rule_of(call, self.axis, self.mesh, relaxed=True)
        return self.rules[call]

    def cut(self, rule: Rule, dims: Dims, shard: Shard) -> Cut | None:
        return cut_of(rule, dims, shard, self.mesh.pieces(self.axis))

    @cached_property
    def calls(self) -> dict[Node, None]:
        """Calls that compute with tokens and parameters, in order, up to what contracts the tokens."""
        names = names_of_parameters(self.gm)
        made = set(reach((n for n in self.gm.graph.nodes if n.name in names), lambda n: n.users))
        found: dict[Node, None] = {}
        own = inside_of(self.gm.graph)  # placed with what they are the backwards of
        for node in self.gm.graph.nodes:
            if node.op != "call_function" or node not in made or node in own or node.target in _APART:
                continue
            operands = [maker_of(x) for x in tensor_operands(node)]
            reads = node in self.labels or any(x in found or (x in self.labels and x in made) for x in operands)
            if reads and has_rule(node) and not self._contracts(node):
                found[node] = None
        return found

    def on_tokens(self, call: Node) -> Cut | None:
        """How a call runs on the tokens of a rank; None if it cannot."""
        for i, value in results_of(call):
            if value in self.labels:
                cut = self.cut(self.rule(call), self.rule(call).results[i], self.labels[value])
                if cut is not None:
                    return cut
        return None

    def _contracts(self, call: Node) -> bool:
        rule = self.rule(call)
        for x, dims in zip(tensor_operands(call), rule.operands, strict=True):
            if x in self.labels and dims is not None:
                cut = self.cut(rule, dims, self.labels[x])
                if cut is not None and all(_shard_of(rule, d, cut) is None for d in rule.results):
                    return True
        return False

    @cached_property
    def mixing(self) -> dict[Node, None]:
        """Calls that cannot run on the tokens of a rank, or send more for a halo than for all-to-alls around them."""
        return dict.fromkeys(call for call in self.calls if self.on_tokens(call) is None or self._halo_costs_more(call))

    def _halo_costs_more(self, call: Node) -> bool:
        ranks = self.mesh.size(self.axis)
        return halo_bytes(self, call) > 2 * nbytes(call) * (ranks - 1) / ranks**2


def maker_of(value: Node) -> Node:
    """The call that makes a value."""
    return value.args[0] if getitem_index(value) is not None else value  # type: ignore[return-value]


def results_of(call: Node) -> Iterator[tuple[int, Node]]:
    """(index, value) of each result of a call that is used."""
    if not isinstance(call.meta["val"], (list, tuple)):
        yield 0, call
        return
    for user in call.users:
        index = getitem_index(user)
        if index is not None:
            yield index, user


def cut_of(rule: Rule, dims: Dims, shard: Shard, ranks: Pieces) -> Cut | None:
    """The factors that a Shard means for a call; None if the call cannot run on it."""
    try:
        return rule.completed(rule.cut_of(dims, shard, ranks))
    except RuleError:
        return None


def _shard_of(rule: Rule, dims: Dims | None, cut: Cut) -> Shard | None:
    try:
        return None if dims is None else rule.shard_of(dims, cut)
    except RuleError:
        return None


# --- following channels ----------------------------------------------------------------------------------------


class _Channels:
    """Follows channels from seeds through ``calls``: towards inputs first, so that what a region returns decides."""

    def __init__(self, tokens: Tokens, calls: Collection[Node]) -> None:
        self.tokens, self.calls = tokens, calls
        self.cuts: dict[Node, Cut] = {}  # call -> the factors that it shards
        self.makes: dict[Node, None] = {}  # calls whose result has channels that no operand has
        self.labels: dict[Node, Shard] = {}
        self.up: deque[Node] = deque()
        self.down: deque[Node] = deque()

    def spread(self, seed: Seed) -> None:
        self._label(*seed)
        while self.up or self.down:
            if self.up:
                value = self.up.popleft()
                self.down.append(value)
                maker = maker_of(value)
                if maker in self.calls and maker not in self.cuts:
                    dims = self.tokens.rule(maker).results[getitem_index(value) or 0]
                    if not self._shard(maker, dims, self.labels[value]):
                        self.makes[maker] = None
                continue
            value = self.down.popleft()
            for user in value.users:
                if user in self.calls and user not in self.cuts and user not in self.makes:
                    for x, operand in zip(tensor_operands(user), self.tokens.rule(user).operands, strict=True):
                        if x is value and operand is not None:
                            self._shard(user, operand, self.labels[value])

    def with_repeats(self) -> dict[Node, Cut]:
        """The cuts, and an empty one for each call that runs whole for channels: it mixes tokens, and all channels need
        its result, or its users can slice what it repeats for them."""
        repeats = (n for n in self.makes if n not in self.tokens.mixing and n.target not in PRODUCTS)
        cuts: dict[Node, Cut] = {**{n: {} for n in repeats}, **self.cuts}
        for call in reversed(self.tokens.mixing):
            if call not in cuts and self.is_needed_whole(call, cuts):
                cuts[call] = {}
        return cuts

    def is_needed_whole(self, call: Node, cuts: Mapping[Node, Cut]) -> bool:
        """Whether all that reads a call has cuts, of channels that the result lacks."""
        read = [(x, user) for _, x in results_of(call) for user in x.users if user in self.tokens.calls]
        return bool(read) and not any(
            user not in cuts or _has_channels(self.tokens.rule(user), user, x, cuts[user]) for x, user in read
        )

    def _label(self, value: Node, shard: Shard) -> None:
        if value not in self.labels:
            self.labels[value] = shard
            self.up.append(value)

    def _shard(self, call: Node, dims: Dims, shard: Shard) -> bool:
        """Shard a call as one of its values is, if its results and a value of tokens then have channels."""
        rule = self.tokens.rule(call)
        cut = self.tokens.cut(rule, dims, shard)
        if cut is None:
            return False
        operands = [_shard_of(rule, d, cut) for d in rule.operands]
        results = [_shard_of(rule, d, cut) for d in rule.results]
        read = [(x, label) for x, label in zip(tensor_operands(call), operands, strict=True) if label is not None]
        read = [(x, label) for x, label in read if maker_of(x) in self.tokens.calls]
        if not read or None in results:
            return False  # contracted, or a product with a weight, which tokens compute as well
        self.cuts[call] = cut
        for x, label in read:
            self._label(x, label)
        for i, value in results_of(call):
            self._label(value, results[i])  # type: ignore[arg-type]
        return True


def find_seeds(tokens: Tokens) -> list[Seed]:
    """One dim of one value for each region that has channels, the last region first."""
    found, barred = _Channels(tokens, tokens.calls), _dims_of_inputs(tokens)
    seeds: list[Seed] = []
    whole: dict[Node, Cut] = {}
    for call in reversed(tokens.mixing):
        if call in found.cuts:
            continue
        if found.is_needed_whole(call, found.cuts | whole):
            whole[call] = {}
            continue
        left = {n: None for n in tokens.mixing if n not in found.cuts}
        best = max(_candidates(call, tokens, barred), key=lambda seed: _spared(tokens, left, seed), default=None)
        if best is not None and _spared(tokens, left, best):
            seeds.append(best)
            found.spread(best)
    return seeds


def _candidates(call: Node, tokens: Tokens, barred: Mapping[Node, set[int]]) -> Iterator[Seed]:
    ranks = tokens.mesh.size(tokens.axis)
    for _, value in results_of(call):
        for dim, size in enumerate(shape_on(value, tokens.axis, tokens.mesh)):
            if size > 1 and dim not in barred.get(value, ()):
                yield value, shard_of_size(dim, size, ranks)


def _spared(tokens: Tokens, calls: Collection[Node], seed: Seed) -> float:
    """Bytes of results of the calls that a rank is spared by a seed."""
    channels = _Channels(tokens, calls)
    channels.spread(seed)
    return sum(map(nbytes, channels.cuts)) * (1 - share_of(tokens, seed))


def share_of(tokens: Tokens, seed: Seed) -> float:
    """The share of the channels that a rank has, with padding."""
    ranks, units = tokens.mesh.size(tokens.axis), seed[1].units
    return -(-units // ranks) / units if units else 1 / ranks


def _dims_of_inputs(tokens: Tokens) -> dict[Node, set[int]]:
    """Value -> its dims that come from inputs: examples and tokens. Channels come from parameters."""
    found: dict[Node, set[int]] = {node: {label.dim} for node, label in tokens.labels.items()}
    specs = input_specs(tokens.gm)
    for node in tokens.gm.graph.nodes:
        if node.op != "placeholder" or specs[node.name].kind != "input":
            continue
        for dim, size in enumerate(shape_on(node, tokens.axis, tokens.mesh)):
            if size > 1 and dim not in found.get(node, ()):
                one = Mesh.of(dp=size)  # a row for each rank: the smallest shards
                for value, label in spread_label(node, Shard(dim), one, "dp", inputs=True).items():
                    found.setdefault(value, set()).add(label.dim)
    return found


# --- where to exchange -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """``inside``: calls that run on channels. ``repeats``: those among them that are replicated, because their operands
    lack the channels. ``labels``: values of the others, and of calls right beside them, which run on tokens, with what
    shards them. ``exchanged``: (value, whether it enters, bytes that a rank sends)."""

    inside: Collection[Node] = ()
    repeats: Collection[Node] = ()
    labels: Mapping[Node, Shard] = field(default_factory=dict)
    exchanged: Sequence[tuple[Node, bool, float]] = ()

    def cut(self, call: Node, rule: Rule, ranks: Pieces) -> Cut | None:
        """The factors that a call shards. Found anew for the rule at hand: that of another axis' conversion depends on
        how its operand is sharded by now."""
        for i, value in results_of(call) if self.labels else ():
            if value in self.labels:
                return cut_of(rule, rule.results[i], self.labels[value], ranks)
        return None


def channel_region(tokens: Tokens, seeds: Iterable[Seed]) -> Region:
    """What runs on channels, from seeds on."""
    found = _Channels(tokens, tokens.calls)
    for seed in seeds:
        found.spread(seed)
    cuts = found.with_repeats()
    inside = _inside(tokens, cuts)
    exchanged = [
        (value, enters, cost)
        for value, enters, users, cost, whole in _values(tokens, cuts)
        if (whole or (maker_of(value) in inside) != enters) and any((user in inside) == enters for user in users)
    ]
    labels: dict[Node, Shard] = {}
    for call in tokens.calls:
        if cuts.get(call) if call in inside else any(maker_of(x) in inside for x in tensor_operands(call)):
            of = found.labels if call in inside else tokens.labels
            labels |= {x: of[x] for _, x in results_of(call) if x in of}
    return Region(inside, {call for call in inside if not cuts[call]}, labels, exchanged)


def _values(tokens: Tokens, cuts: Mapping[Node, Cut]) -> Iterator[tuple[Node, bool, list[Node], float, bool]]:
    """(value, True, users, bytes, False) if its maker is on tokens and these users on channels; (.., False, ..) the
    reverse: of an all-to-all, bytes that a rank sends. (.., True): of an all-gather for users on channels that lack
    them, on whichever side its maker is."""
    calls, ranks = tokens.calls, tokens.mesh.size(tokens.axis)
    for call in calls:
        for _, value in results_of(call):
            size = nbytes(value) * (ranks - 1) / ranks
            users = [user for user in value.users if user in calls]
            by_need: dict[bool, list[Node]] = {}
            for user in users:
                if user in cuts:
                    by_need.setdefault(_has_channels(tokens.rule(user), user, value, cuts[user]), []).append(user)
            for has_channels, some in by_need.items():
                yield value, True, some, size / ranks if has_channels else size, not has_channels
            users = [user for user in users if user in cuts or user not in tokens.mixing]
            if users and cuts.get(call):
                yield value, False, users, size / ranks, False


def halo_bytes(tokens: Tokens, call: Node) -> float:
    """Bytes that a rank sends for a call on its tokens: the rows of all ranks that others read."""
    rows, label = rows_sent(call, tokens.axis), tokens.labels.get(call)
    if not rows or label is None:
        return 0.0
    of_all = shape_on(call, tokens.axis, tokens.mesh)[label.dim]
    return nbytes(call) * min(1.0, rows * max(1, len(label.blocks)) / of_all) * (tokens.mesh.size(tokens.axis) - 1)


def _has_channels(rule: Rule, call: Node, value: Node, cut: Cut) -> bool:
    dims = [d for x, d in zip(tensor_operands(call), rule.operands, strict=True) if x is value and d is not None]
    return any(_shard_of(rule, d, cut) is not None for d in dims)


def _inside(tokens: Tokens, cuts: Mapping[Node, Cut]) -> set[Node]:
    """The side of the channels in the cut that sends the fewest bytes: all that mixes tokens, as far as it has
    channels, and whatever else makes exchanges smaller. Of equal cuts the one with the smaller region."""
    import networkx as nx  # slow to import

    fixed = {call for call in tokens.mixing if call in cuts}
    numbers = {call: i for i, call in enumerate(call for call in cuts if call not in fixed)}
    source, sink = len(numbers), len(numbers) + 1
    graph = nx.DiGraph()
    graph.add_nodes_from([source, sink])
    for between, (value, enters, users, cost, whole) in enumerate(_values(tokens, cuts), start=sink + 1):
        maker, *others = (sink if n in fixed else numbers.get(n, source) for n in (maker_of(value), *users))
        maker = source if whole else maker
        if (maker_of(value) in tokens.mixing and maker != sink and not whole) or {*others} == {maker}:
            continue
        inward = [(maker, between), *((between, other) for other in others)]
        for i, (a, b) in enumerate(inward):
            capacity = {"capacity": cost} if i == 0 else {}
            graph.add_edge(*((a, b) if enters else (b, a)), **capacity)
    for call, i in numbers.items():
        if sent := halo_bytes(tokens, call):
            graph.add_edge(i, sink, capacity=sent)
    _, far = nx.minimum_cut(graph, source, sink)[1]
    return fixed | {call for call, i in numbers.items() if i in far}


# --- in the plan -------------------------------------------------------------------------------------------------


def seeds_of(gm: GraphModule, streams: Iterable[Stream], mesh: Mesh, axis: str) -> list[Seed]:
    """The seeds that a plan names."""
    by_name = {n.name: n for n in gm.graph.nodes}
    found = []
    for stream in streams:
        if stream.channels and stream.axis == axis:
            if stream.node not in by_name:
                raise ValueError(
                    f"plan: the region that ends at {stream.node!r} is not in this graph; make a plan for it"
                )
            value = by_name[stream.node]
            size = shape_on(value, axis, mesh)[stream.dim]
            found.append((value, Shard(stream.dim, scaled_blocks(stream.blocks, size), units=stream.units)))
    return found

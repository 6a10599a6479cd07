"""The layers of a joint graph, and what it costs each to save some values and to make others again.

    joint graph --`layers_of`--> layers of calls, in order --`JointFacts.find_ways`--> `LayerWay`s

A layer is what `planner.units` calls one: a repeated block, or what stands between blocks. A value that leaves its
layer is never made again. F and B of a layer are gone through as they will run, with what is made again right before
its first use; layers that are equal but for names share what was found.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from autopar.checkpoint_policies import ForwardValue, Policy
from autopar.cost.attention_traffic import is_context_attention
from autopar.cost.flops import node_seconds
from autopar.cost.traffic import Links
from autopar.ir.graph import frozen, is_call, layer_of, module_path
from autopar.ir.storages import Storage, size_of, storages, workspace
from autopar.ops.traits import COLLECTIVES, PRODUCTS, SUMS, is_choice, is_random
from autopar.passes.joint import Joint
from autopar.planner.recompute_cut import RemakableValue, ways
from autopar.planner.recompute_layers import LayerWay
from autopar.planner.units import units_of


def is_pinned(node: Node) -> bool:
    """What is never made again: choices of experts, and attention over cut sequences."""
    return is_choice(node.target) or is_random(node.target) or is_context_attention(node)


@dataclass
class LayerFacts:
    """One layer of a joint graph. forward, backward: its nodes, in order. taken: values of earlier layers that it takes
    in F. through: bytes that live across its F and its B without being saved, and gradients of later layers."""

    name: str
    forward: list[Node] = field(default_factory=list)
    backward: list[Node] = field(default_factory=list)
    taken: list[Node] = field(default_factory=list)
    through: tuple[int, int] = (0, 0)
    options: list[tuple[frozenset[Node], LayerWay]] = field(default_factory=list)

    def way(self, number: int) -> frozenset[Node]:
        """What is made again."""
        return self.options[number][0]


def layers_of(calls: Sequence[Node], asked: bool = False) -> list[list[Node]]:
    """What is looked at together: a repeated block, or what stands between; ``asked``: what the model calls within one
    checkpoint, and what between."""
    if not asked:
        return [unit.nodes for unit in units_of(calls)] if calls else []
    runs = itertools.groupby(calls, lambda node: node.meta.get("asked") or (layer_of(node),))
    return [list(nodes) for _, nodes in runs]


class JointFacts:
    """The layers of a joint graph with the ways that each has to choose from (`LayerFacts.options`)."""

    def __init__(
        self, joint: Joint, units: Sequence[Sequence[Node]], links: Links, first: Collection[Node] | None = None
    ) -> None:
        """``units``: the calls of the graph that the joint one was made of, which its nodes name by number, layer by
        layer. ``first``: what B runs of the backward, where W runs the rest."""
        self.joint, self.links = joint, links
        self.late = set[Node]() if first is None else {n for n in joint.dependent if n not in first}
        self.behind = storages(joint.gm, in_place=True)
        self.wanted = dict.fromkeys(joint.wanted)
        self.layers = self._layers(units)
        self.layer = {n: i for i, layer in enumerate(self.layers) for n in (*layer.forward, *layer.backward)}
        self.crossing = self._crossing()
        self._find_taken()
        self._find_uses()
        self._find_through()
        self.seconds = {n: node_seconds(n, links=links) for layer in self.layers for n in layer.forward}

    def _layers(self, units: Sequence[Sequence[Node]]) -> list[LayerFacts]:
        """In the order of the forward."""
        found = [LayerFacts(layer_of(unit[0]) or module_path(unit[0])) for unit in units]
        of_call = [i for i, unit in enumerate(units) for _ in unit]
        for node in self.joint.order:
            if node.op == "call_function" and found:
                at = found[of_call[node.meta["call"]] if node.meta.get("call", -1) >= 0 else -1]
                (at.backward if node in self.joint.dependent else at.forward).append(node)
        return [layer for layer in found if layer.forward]

    # --- what layers share ---------------------------------------------------------------------------------

    def _crossing(self) -> set[Node]:
        """Values that a later layer takes in F."""
        found: set[Node] = set()
        for i, layer in enumerate(self.layers):
            for node in layer.forward:
                if node in self.joint.made:
                    found.update(x for x in self.sources(node.all_input_nodes) if self.layer.get(x, i) != i)
        return found

    def _find_taken(self) -> None:
        for i, layer in enumerate(self.layers):
            taken = (x for n in layer.forward for x in self.sources(n.all_input_nodes) if self.layer.get(x, i) != i)
            layer.taken = list(dict.fromkeys(taken))

    def _find_uses(self) -> None:
        """Storage -> the layers that use it, in F and in B (-1: it is a gradient, and stays)."""
        self.in_f: dict[Storage, set[int]] = {}
        self.in_b: dict[Storage, set[int]] = {}
        for node, i in self.layer.items():
            uses = self.in_b if node in self.joint.dependent else self.in_f
            for x in (node, *node.all_input_nodes) if node in self.joint.made or uses is self.in_b else ():
                for s in self.behind.get(x, ()):
                    uses.setdefault(s, set()).add(i)
        for g in self.joint.gradients.values():
            for s in self.behind[g] if g is not None else ():
                self.in_b.setdefault(s, set()).add(-1)

    def _find_through(self) -> None:
        """Of what lives across a layer without being saved; and of the gradients of those behind it."""
        forward, backward = ([0] * len(self.layers) for _ in range(2))
        saved = {s for x in self.wanted for s in self.behind[x]}
        for s, users in self.in_f.items():
            if s[0] in self.layer and s not in saved:
                for i in set(range(self.layer[s[0]], max(users))) - users:
                    forward[i] += size_of(s)
        for s, users in self.in_b.items():
            if s[0] in self.joint.dependent and s[0] in self.layer:
                for i in set(range(max(min(users), 0), self.layer[s[0]])) - users:
                    backward[i] += size_of(s)
        for layer, *through in zip(self.layers, forward, backward, strict=True):
            layer.through = through[0], through[1]

    def sources(self, nodes: Iterable[Node]) -> list[Node]:
        """What must be saved or made again for these to be there: views and values of parameters are looked
        through, what is given is left out."""
        return self.joint.sources(nodes)

    def size(self, node: Node) -> int:
        """Bytes of the storages that a node allocates; of an entry, of its own."""
        if is_call(node, operator.getitem):
            return sum(size_of(s) for s in self.behind[node])
        return sum(size_of(s) for s in self.behind.get(node, ()) if s[0] is node)

    def may_be_remade(self, node: Node) -> bool:
        """Whether there is a choice: entries go with the call that they are of."""
        if node not in self.joint.made or self.joint.is_free(node) or is_call(node, operator.getitem):
            return False
        return not is_pinned(node) and node not in self.crossing

    def seen(self, layer: LayerFacts, node: Node) -> ForwardValue:
        """As a policy sees it."""
        return ForwardValue(
            target=str(node.target),
            module=module_path(node),
            layer=layer_of(node),
            bytes=self.size(node),
            seconds=self.seconds[node],
            product=node.target in PRODUCTS,
            attention="attention" in str(node.target),
            exchange=node.target in COLLECTIVES,
            sums=node.target in SUMS,
            asked=bool(node.meta.get("asked")),
        )

    def cost(self, layer: LayerFacts, way: frozenset[Node]) -> tuple[int, float]:
        """(bytes that the layer keeps, seconds of what it makes again)."""
        found = self._measured(layer, way)[1]
        return found.saved, found.seconds

    # --- ways ----------------------------------------------------------------------------------------------

    def find_ways(self, known: dict[Hashable, list[tuple[frozenset[int], LayerWay]]] | None = None) -> None:
        """Fill in `LayerFacts.options`. ``known``: of equal layers, of whichever joint graph."""
        known = {} if known is None else known
        for layer in self.layers:
            nodes, key = layer.forward, self._key(layer)
            if key not in known:
                place = {n: i for i, n in enumerate(nodes)}
                known[key] = [(frozenset(place[n] for n in way), facts) for way, facts in self._ways(layer)]
            layer.options = [
                (frozenset(nodes[i] for i in way), facts.within(*layer.through)) for way, facts in known[key]
            ]

    def _key(self, layer: LayerFacts) -> Hashable:
        """Equal for layers that are equal but for names."""
        place: dict[Node, int] = {}

        def of(x: Any) -> Hashable:
            if not isinstance(x, Node):
                return repr(x)
            new = x not in place
            number = place.setdefault(x, len(place))
            facts = (x in self.wanted, x in self.crossing, x in self.late, x.op, self.size(x))
            return (number, *facts) if new else number

        nodes = [*layer.forward, *layer.backward]
        calls = tuple((n.target, frozen(n.args, of), frozen(n.kwargs, of), of(n)) for n in nodes)
        ends = tuple(any(self.layer.get(u, -1) != self.layer[n] for u in n.users) for n in nodes)
        return calls, ends, tuple(self.seconds[n] for n in layer.forward)

    def _ways(self, layer: LayerFacts) -> list[tuple[frozenset[Node], LayerWay]]:
        own = [n for n in layer.forward if n in self.joint.made or is_call(n, operator.getitem)]
        own = [n for n in own if not self.joint.is_free(n)]
        taken = [x for x in layer.taken if x not in self.wanted]  # else it is there anyway
        nodes = [*own, *taken]
        place = {n: i for i, n in enumerate(nodes)}
        wanted = [place[n] for n in own if n in self.wanted]
        values = [
            RemakableValue(
                self.seconds[n],
                0 if isinstance(n.meta["val"], (tuple, list)) else self.size(n),
                is_pinned(n) or n in self.crossing,
                tuple(place[x] for x in self.sources(n.all_input_nodes) if x in place),
            )
            for n in own
        ]
        values += [RemakableValue(0.0, self.size(x), pinned=True) for x in taken]
        found = [self._measured(layer, frozenset(nodes[i] for i in way)) for way in ways(values, wanted)]
        return _worth_choosing(found)

    def _measured(self, layer: LayerFacts, way: frozenset[Node]) -> tuple[frozenset[Node], LayerWay]:
        saved, again = self.joint.closure([n for n in layer.forward if n in self.wanted], way)
        kept = {s for x in saved for s in self.behind[x]}
        own = {s for s in kept if self.layer.get(s[0]) == self.layer[layer.forward[0]]} if layer.forward else set()
        extra = sum(self.size(x) for x in saved if x in layer.taken and x not in self.wanted)
        size = sum(map(size_of, own)) + extra
        seconds = sum(self.seconds.get(x, 0.0) for x in again if not self.joint.is_free(x))
        forward = self._forward_peak(layer, own)
        left = self._left_for_w(layer, again, own)
        backward = self._backward_peak(layer, set(saved), own, left)
        made = LayerWay(size, seconds, forward + extra, backward + extra, sum(map(size_of, left)))
        return frozenset(x for x in again if x in way), made

    def _left_for_w(self, layer: LayerFacts, again: Collection[Node], own: Collection[Storage]) -> set[Storage]:
        """What W takes of what B has, and of what F has saved."""
        taken = [x for n in layer.backward if n in self.late for x in n.all_input_nodes]
        gradients = {s for x in taken if x in self.joint.dependent and x not in self.late for s in self.behind[x]}
        values = {s for x in self.sources(taken) if x in again for s in self.behind[x]}
        kept = {s for x in self.sources(taken) for s in self.behind[x] if s in own}
        return gradients | values | kept

    def _forward_peak(self, layer: LayerFacts, saved: Collection[Storage]) -> int:
        i = self.layer[layer.forward[0]] if layer.forward else -1
        kept = set(saved) | {s for n in layer.forward if n in self.crossing for s in self.behind[n]}
        made = [n for n in layer.forward if n in self.joint.made or n in self.joint.parameter_only]
        given = {s for x in layer.taken if x not in self.wanted for s in self.behind[x] if max(self.in_f[s]) == i}
        return self._peak(made, given, kept)

    def _backward_peak(
        self, layer: LayerFacts, saved: set[Node], own: Collection[Storage], left: Collection[Storage]
    ) -> int:
        """Of B, or of B and W in one. What comes in from later layers lives to its last use, what goes out to earlier
        ones stays, and so does what is left for W."""
        run: dict[Node, None] = {}

        def make(x: Node) -> None:
            if x in run or x in saved or x.op != "call_function" or (x in self.joint.dependent and x not in mine):
                return
            if self.layer.get(x, i) != i and not self.joint.is_free(x):
                return  # of another layer: it is saved there
            for operand in x.all_input_nodes:
                make(operand)
            run[x] = None

        early = [n for n in layer.backward if n not in self.late]
        mine = set(early)
        i = self.layer[layer.backward[0]] if layer.backward else -1
        for node in early:
            make(node)
        taken = {x for n in early for x in n.all_input_nodes if x in self.joint.dependent and x not in mine}
        given = {s for x in taken if x.op == "call_function" for s in self.behind[x]}
        made = {s for n in early for s in self.behind[n]}
        kept = {s for s in given | made if min(self.in_b.get(s, {i})) < i and s[0] in self.joint.dependent}
        used = {s for n in run for x in n.all_input_nodes for s in self.behind.get(x, ())}
        return self._peak(list(run), given | (used & set(own)), kept | set(left))

    def _peak(self, run: Sequence[Node], given: Collection[Storage], kept: Collection[Storage]) -> int:
        """Most bytes alive at once while nodes run: what is given dies as all else after its last use, but for what is
        kept."""
        last = {s: n for n in run for x in (n, *n.all_input_nodes) for s in self.behind.get(x, ())}
        mine, given = {n: None for n in run}, set(given)
        dying: dict[Node, list[Storage]] = {}
        for s, n in last.items():
            if (s[0] in mine or s in given) and s not in kept:
                dying.setdefault(n, []).append(s)
        live = most = sum(map(size_of, given))
        for node in run:
            live += sum(size_of(s) for s in self.behind[node] if s[0] is node and s not in given)
            most = max(most, live + workspace(node))
            live -= sum(map(size_of, dying.get(node, ())))
        return most


def _worth_choosing(found: Sequence[tuple[frozenset[Node], LayerWay]]) -> list[tuple[frozenset[Node], LayerWay]]:
    """Without those that another beats in bytes, time and what is alive. In order of time."""
    order = sorted(found, key=lambda pair: (pair[1].seconds, pair[1].saved, pair[1].alive))
    kept: list[tuple[frozenset[Node], LayerWay]] = []
    for way, facts in order:
        if not any(
            k.saved <= facts.saved and k.forward <= facts.forward and k.backward <= facts.backward for _, k in kept
        ):
            kept.append((way, facts))
    return kept


def chosen_by(policy: Policy, name: str, facts: JointFacts) -> frozenset[Node]:
    """What a policy makes again. Raises ValueError for one that says neither yes nor no."""
    found = set()
    for layer in facts.layers:
        for node in layer.forward:
            if facts.may_be_remade(node):
                answer = policy(facts.seen(layer, node))
                if not isinstance(answer, bool):
                    raise ValueError(
                        f"checkpoint: the policy {name!r} says of each value whether the backward makes it again, "
                        f"found {answer!r} of {node.target}; return True or False"
                    )
                if answer:
                    found |= {node, *(u for u in node.users if is_call(u, operator.getitem))}
    return frozenset(n for n in found if n not in facts.crossing)

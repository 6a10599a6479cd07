"""The layers of a joint graph: which values each has, takes and hands on, and which of them may be made again.

    calls of a local graph --`layers_of`--> layers, in order --`JointInfo`--> their nodes in F and in B

A layer is what `planner.units` calls one: a repeated block, or what stands between blocks. A value that leaves its
layer is never made again.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from autopar.ac_policies import HOST, ForwardValue, Policy
from autopar.cost.attention_costs import is_context_attention
from autopar.cost.flops import node_seconds
from autopar.cost.hardware import DEFAULT, Device
from autopar.cost.topology import Topology
from autopar.cost.traffic import Links
from autopar.ir.graph import is_call, layer_of, module_path
from autopar.ir.storages import Storage, size_of, storages
from autopar.ops.traits import COLLECTIVES, PRODUCTS, SUMS, is_choice, is_random
from autopar.passes.autodiff.joint import Joint
from autopar.planner.pipeline.split_candidates import units_of
from autopar.planner.recompute.layer_solver import RecomputeOption


def is_pinned(node: Node) -> bool:
    """What is never made again: choices of experts, and attention over cut sequences."""
    return is_choice(node.target) or is_random(node.target) or is_context_attention(node)


@dataclass(frozen=True)
class ChosenValues:
    """Values that the backward makes again, and those that wait in host memory."""

    again: frozenset[Node] = frozenset()
    host: frozenset[Node] = frozenset()

    def __or__(self, other: ChosenValues) -> ChosenValues:
        return ChosenValues(self.again | other.again, self.host | other.host)


@dataclass
class LayerTensors:
    """One layer of a joint graph. forward, backward: its nodes, in order. taken: values of earlier layers that it takes
    in F. through: bytes that live across its F and its B without being saved, and gradients of later layers. options:
    what it has to choose from (`autopar.compile.layer_options`), and what that costs."""

    name: str
    forward: list[Node] = field(default_factory=list)
    backward: list[Node] = field(default_factory=list)
    taken: list[Node] = field(default_factory=list)
    through: tuple[int, int] = (0, 0)
    options: list[tuple[ChosenValues, RecomputeOption]] = field(default_factory=list)

    def way(self, number: int) -> ChosenValues:
        """One of them."""
        return self.options[number][0]


def layers_of(calls: Sequence[Node], asked: bool = False) -> list[list[Node]]:
    """What is looked at together: a repeated block, or what stands between; ``asked``: what the model calls within one
    checkpoint, and what between."""
    if not asked:
        return [unit.nodes for unit in units_of(calls)] if calls else []
    runs = itertools.groupby(calls, lambda node: node.meta.get("asked") or (layer_of(node),))
    return [list(nodes) for _, nodes in runs]


class JointInfo:
    """The layers of a joint graph, and what passes between them."""

    def __init__(
        self,
        joint: Joint,
        units: Sequence[Sequence[Node]],
        links: Links,
        first: Collection[Node] | None = None,
        device: Device = DEFAULT,
        host: Topology = DEFAULT.host,
        offloads: bool = False,
    ) -> None:
        """``units``: the calls of the graph that the joint one was made of, which its nodes name by number, layer by
        layer. ``first``: what B runs of the backward, where W runs the rest. ``host``: the link to host memory;
        ``offloads``: values may wait there."""
        self.joint, self.links, self.device, self.host, self.offloads = joint, links, device, host, offloads
        self.late = set[Node]() if first is None else {n for n in joint.dependent if n not in first}
        sums = {n for n in joint.order if n in joint.dependent or is_call(n, *SUMS)}  # others may be kept beside
        self.behind = storages(joint.gm, in_place=sums)
        self.wanted = dict.fromkeys(joint.wanted)
        self._hidden: dict[int, tuple[float, float]] = {}
        self.layers = self._layers(units)
        self.layer = {n: i for i, layer in enumerate(self.layers) for n in (*layer.forward, *layer.backward)}
        self.crossing = self._crossing()
        self._find_taken()
        self._find_uses()
        self._find_through()
        self.seconds = {n: node_seconds(n, device, links) for layer in self.layers for n in layer.forward}

    def _layers(self, units: Sequence[Sequence[Node]]) -> list[LayerTensors]:
        """In the order of the forward."""
        found = [LayerTensors(layer_of(unit[0]) or module_path(unit[0])) for unit in units]
        of_call = [i for i, unit in enumerate(units) for _ in unit]
        for node in self.joint.order:
            if node.op == "call_function" and found:
                at = found[of_call[node.meta["call"]] if node.meta.get("call", -1) >= 0 else -1]
                (at.backward if node in self.joint.dependent else at.forward).append(node)
        return [layer for layer in found if layer.forward]

    # --- copies to the host --------------------------------------------------------------------------------

    def behind_copies(self, layer: LayerTensors) -> tuple[float, float]:
        """Seconds that the device computes while a layer's values are on their way out, and back: one layer's, the next
        one's, in F and in B. Of the last layer none: its B comes at once."""
        i = self.layer[layer.forward[0]] + 1
        if i not in self._hidden:
            after = self.layers[i] if i < len(self.layers) else LayerTensors("")
            made = (self.seconds[n] for n in after.forward if n in self.joint.made)
            back = (node_seconds(n, self.device, self.links) for n in after.backward)
            self._hidden[i] = math.fsum(made), math.fsum(back)
        return self._hidden[i]

    def exposed(self, layer: LayerTensors, sizes: Sequence[int]) -> float:
        """Seconds that the device waits for copies of some sizes, out and back."""
        if not sizes:
            return 0.0
        way = len(sizes) * self.host.latency + sum(sizes) / self.host.bandwidth
        return math.fsum(max(way - hidden, 0.0) for hidden in self.behind_copies(layer))

    def copy_seconds(self, layer: LayerTensors, sizes: Sequence[int]) -> float:
        """What copies cost: what the device waits for, and the share of its memory's bandwidth that they take."""
        return self.exposed(layer, sizes) + 2 * sum(sizes) / self.device.memory if sizes else 0.0

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

    def may_be_asked(self, node: Node) -> bool:
        """Whether there is a choice: entries go with the call that they are of."""
        joint = self.joint
        made = node in joint.made and node not in joint.early
        return made and not joint.is_free(node) and not is_call(node, operator.getitem)

    def may_be_remade(self, node: Node) -> bool:
        """Whether the backward can make it again."""
        return self.may_be_asked(node) and not is_pinned(node) and node not in self.crossing

    def needed(self, chosen: ChosenValues) -> ChosenValues:
        """Of what was chosen what B needs, and what can wait in host memory."""
        kept, again = self.joint.closure(self.joint.wanted, chosen.again)
        hosts = (x for x in kept if x in chosen.host and self.joint.may_wait_on_host(x))
        return ChosenValues(frozenset(again) & chosen.again, frozenset(hosts))

    def seen(self, node: Node) -> ForwardValue:
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
            remakable=self.may_be_remade(node),
        )


def chosen_by(policy: Policy, name: str, facts: JointInfo) -> ChosenValues:
    """What a policy chooses. Raises ValueError for one that says neither yes, nor no, nor "host"."""
    again, host = set[Node](), set[Node]()
    for layer in facts.layers:
        for node in layer.forward:
            if not facts.may_be_asked(node):
                continue
            answer = policy(facts.seen(node))
            if not isinstance(answer, bool) and answer != HOST:
                raise ValueError(
                    f"activation_checkpoint: the policy {name!r} says of each value whether the backward makes it "
                    f"again, found {answer!r} of {node.target}; return True, False or {HOST!r}"
                )
            values = {node, *(u for u in node.users if is_call(u, operator.getitem))}
            if answer == HOST:
                host |= values
            elif answer and facts.may_be_remade(node):
                again |= values - facts.crossing
    return ChosenValues(frozenset(again) | facts.joint.always, frozenset(host))

"""The layers of a joint graph: their values, inputs and outputs, and which values may be recomputed.

    calls of a local graph --`layers_of`--> layers, in order --`JointInfo`--> their nodes in F and in B

A layer is what `planner.units` calls one: a repeated block, or the calls between blocks. A value that leaves its layer
is never recomputed.
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
from autopar.cost.hardware import DEFAULT, Device, Links
from autopar.cost.topology import Topology
from autopar.ir.graph import is_call, layer_of, module_path
from autopar.ir.storages import Storage, size_of, storages
from autopar.ops.traits import COLLECTIVES, PRODUCTS, SUMS, is_choice, is_random
from autopar.passes.autodiff.joint import Joint
from autopar.planner.pipeline.split_candidates import units_of
from autopar.planner.recompute.layer_solver import RecomputeOption


def is_pinned(node: Node) -> bool:
    """Whether it is never recomputed: choices of experts, and attention over sharded sequences."""
    return is_choice(node.target) or is_random(node.target) or is_context_attention(node)


@dataclass(frozen=True)
class ChosenValues:
    """Values that the backward recomputes, and values that are offloaded to host memory."""

    again: frozenset[Node] = frozenset()
    host: frozenset[Node] = frozenset()

    def __or__(self, other: ChosenValues) -> ChosenValues:
        return ChosenValues(self.again | other.again, self.host | other.host)


@dataclass
class LayerTensors:
    """One layer of a joint graph. forward, backward: its nodes, in order. taken: values of earlier layers that it uses
    in F. through: bytes that live across its F and its B without being saved, and gradients of later layers. options:
    its choices (`autopar.compile.layer_options`), and their costs."""

    name: str
    forward: list[Node] = field(default_factory=list)
    backward: list[Node] = field(default_factory=list)
    taken: list[Node] = field(default_factory=list)
    through: tuple[int, int] = (0, 0)
    options: list[tuple[ChosenValues, RecomputeOption]] = field(default_factory=list)

    def way(self, number: int) -> ChosenValues:
        """The choice with this number."""
        return self.options[number][0]


def layers_of(calls: Sequence[Node], asked: bool = False) -> list[list[Node]]:
    """The units of a choice: a repeated block, or the calls between blocks; ``asked``: the calls of the model within
    one torch.utils.checkpoint, or between two."""
    if not asked:
        return [unit.nodes for unit in units_of(calls)] if calls else []
    runs = itertools.groupby(calls, lambda node: node.meta.get("ac_region") or (layer_of(node),))
    return [list(nodes) for _, nodes in runs]


class JointInfo:
    """The layers of a joint graph, and the values that pass between them."""

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
        """``units``: the calls of the graph that was differentiated, layer by layer; nodes of the joint graph refer to
        them by number. ``first``: the nodes of the backward that B runs, if W runs the rest. ``host``: the link to host
        memory; ``offloads``: values may be offloaded."""
        self.joint, self.links, self.device, self.host, self.offloads = joint, links, device, host, offloads
        self.late = set[Node]() if first is None else {n for n in joint.dependent if n not in first}
        sums = {n for n in joint.order if n in joint.dependent or is_call(n, *SUMS)}  # others may be saved beside them
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
        """Seconds that the device computes while a layer's values are copied out, and back: those of one layer, the
        next one, in F and in B. None for the last layer, whose B follows at once."""
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
        """The cost of copies: the time that the device waits, and their share of its memory bandwidth."""
        return self.exposed(layer, sizes) + 2 * sum(sizes) / self.device.memory if sizes else 0.0

    # --- what layers share ---------------------------------------------------------------------------------

    def _crossing(self) -> set[Node]:
        """Values that a later layer uses in F."""
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
        """Find the bytes that live across each layer without being saved, and the gradients of later layers."""
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
        """The values that must be saved or recomputed to compute these: looks through views and values of parameters,
        leaves out inputs."""
        return self.joint.sources(nodes)

    def size(self, node: Node) -> int:
        """Bytes of the storages that a node allocates; an entry of a tuple counts its own."""
        if is_call(node, operator.getitem):
            return sum(size_of(s) for s in self.behind[node])
        return sum(size_of(s) for s in self.behind.get(node, ()) if s[0] is node)

    def may_be_asked(self, node: Node) -> bool:
        """Whether there is a choice: entries of a tuple follow their call."""
        joint = self.joint
        made = node in joint.made and node not in joint.early
        return made and not joint.is_free(node) and not is_call(node, operator.getitem)

    def may_recompute(self, node: Node) -> bool:
        """Whether the backward can recompute it."""
        return self.may_be_asked(node) and not is_pinned(node) and node not in self.crossing

    def needed(self, chosen: ChosenValues) -> ChosenValues:
        """The chosen values that B needs, and those that can be offloaded to host memory."""
        kept, again = self.joint.closure(self.joint.wanted, chosen.again)
        hosts = (x for x in kept if x in chosen.host and self.joint.can_offload(x))
        return ChosenValues(frozenset(again) & chosen.again, frozenset(hosts))

    def seen(self, node: Node) -> ForwardValue:
        """The value as a policy sees it."""
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
            checkpointed=bool(node.meta.get("ac_region")),
            recomputable=self.may_recompute(node),
        )


def chosen_by(policy: Policy, name: str, facts: JointInfo) -> ChosenValues:
    """The choice of a policy. Raises ValueError for an answer other than True, False or "host"."""
    again, host = set[Node](), set[Node]()
    for layer in facts.layers:
        for node in layer.forward:
            if not facts.may_be_asked(node):
                continue
            answer = policy(facts.seen(node))
            if not isinstance(answer, bool) and answer != HOST:
                raise ValueError(
                    f"activation_checkpoint: the policy {name!r} must say of each value whether the backward "
                    f"recomputes it, found {answer!r} for {node.target}; return True, False or {HOST!r}"
                )
            values = {node, *(u for u in node.users if is_call(u, operator.getitem))}
            if answer == HOST:
                host |= values
            elif answer and facts.may_recompute(node):
                again |= values - facts.crossing
    return ChosenValues(frozenset(again) | facts.joint.always, frozenset(host))

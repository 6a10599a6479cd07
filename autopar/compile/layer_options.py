"""The options of a layer: what it costs to save some values, to recompute others, and to offload some to host memory.

F and B of a layer are simulated as they will run, with recomputed values right before their first use. Layers that are
equal except for names share the result, also across stages.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from autopar.compile.layer_tensors import ChosenValues, JointInfo, LayerTensors, is_pinned
from autopar.cost.flops import memory_bytes
from autopar.ir.graph import frozen, is_call, nbytes, reach
from autopar.ir.live_values import workspace
from autopar.ir.storages import Storage, size_of
from autopar.ops.traits import is_fusible, is_random, is_view, reads_in_kernel
from autopar.passes.autodiff.joint import part_of_view
from autopar.planner.recompute.layer_solver import RecomputableValue, RecomputeOption, cheapest_way, ways

IN_KERNEL = 1 / 50  # of an operator's own kernel: one that is computed within a kernel that reads the same operands
MEMORY = 1 / 2  # of the time to write a value: what its bytes are worth while they wait for the backward

# Of equal layers: numbers of recomputed nodes, and of offloaded ones; what that costs.
Known = dict[Hashable, list[tuple[frozenset[int], frozenset[int], RecomputeOption]]]


def find_ways(facts: JointInfo, known: Known) -> list[list[RecomputeOption]]:
    """Fill in `LayerTensors.options` of every layer; returns the options of each. Adds to ``known``."""
    found = _Ways(facts)
    for layer in facts.layers:
        nodes, key = layer.forward, found.key(layer)
        if key not in known:
            place = {n: i for i, n in enumerate(nodes)}
            known[key] = [
                (frozenset(place[n] for n in way.again), frozenset(place[n] for n in way.host), cost)
                for way, cost in found.ways(layer)
            ]
        layer.options = [
            (ChosenValues(frozenset(nodes[i] for i in again), frozenset(nodes[i] for i in host)), cost)
            for again, host, cost in ((a, h, c.within(*layer.through)) for a, h, c in known[key])
        ]
    return [[way for _, way in layer.options] for layer in facts.layers]


def fused_values(facts: JointInfo, known: dict[Hashable, frozenset[int]]) -> ChosenValues:
    """What a compiled backward recomputes within its kernels. Adds to ``known``, of equal layers."""
    found, chosen = _Ways(facts), set[Node]()
    for layer in facts.layers:
        key = found.key(layer)
        if key not in known:
            again = found.fused(layer)
            known[key] = frozenset(i for i, n in enumerate(layer.forward) if n in again)
        chosen |= {layer.forward[i] for i in known[key]}
    return ChosenValues(frozenset(chosen | _of_inputs(facts)) | facts.joint.always)


def _of_inputs(facts: JointInfo) -> set[Node]:
    """What kernels compute from inputs alone, such as the angles of rotary embeddings and masks: not to be kept, though
    all layers share it."""
    joint, found, free = facts.joint, set[Node](), set(facts.joint.primals)
    for node in joint.order:
        if node not in joint.made or node.op != "call_function" or not free.issuperset(node.all_input_nodes):
            continue
        if joint.is_free(node) and not is_random(node.target):
            free.add(node)
        elif is_fusible(node.target):
            found.add(node)
            free.add(node)
    return found


def cost_of(facts: JointInfo, layer: LayerTensors, way: ChosenValues) -> RecomputeOption:
    """The cost of a layer that recomputes some of its values, or offloads them to the host."""
    return _Ways(facts).measured(layer, way)[1]


class _Ways:
    """The layers of one joint graph."""

    def __init__(self, facts: JointInfo) -> None:
        self.facts, self.joint, self.behind = facts, facts.joint, facts.behind

    def key(self, layer: LayerTensors) -> Hashable:
        """Equal for layers that are equal except for names."""
        place: dict[Node, int] = {}

        def of(x: Any) -> Hashable:
            if not isinstance(x, Node):
                return repr(x)
            new = x not in place
            number = place.setdefault(x, len(place))
            facts = (x in self.facts.wanted, x in self.facts.crossing, x in self.facts.late, x.op, self.facts.size(x))
            return (number, *facts) if new else number

        nodes = [*layer.forward, *layer.backward]
        calls = tuple((n.target, frozen(n.args, of), frozen(n.kwargs, of), of(n)) for n in nodes)
        ends = tuple(any(self.facts.layer.get(u, -1) != self.facts.layer[n] for u in n.users) for n in nodes)
        return calls, ends, tuple(self.facts.seconds[n] for n in layer.forward), self.facts.behind_copies(layer)

    def ways(self, layer: LayerTensors) -> list[tuple[ChosenValues, RecomputeOption]]:
        nodes, wanted, values = self._values(layer)
        found = []
        for way in ways(values, wanted):
            again = frozenset(nodes[i] for i in way)
            found += [self.measured(layer, ChosenValues(again, host)) for host in self._on_host(layer, again)]
        return _worth_choosing(found)

    def fused(self, layer: LayerTensors) -> frozenset[Node]:
        """The values that cost less to recompute within kernels than to save."""
        nodes, wanted, values = self._values(layer)
        fusible, keeping = list[RecomputableValue](), list[float]()
        for node, value in zip(nodes, values, strict=True):
            fuses = is_call(node, operator.getitem) or is_fusible(node.target)
            pinned = value.pinned or not (fuses or node in self.joint.always)
            users = self._users(node)
            written_by_f = pinned or any(u not in self.joint.dependent for u in users)
            written_by_b = any(u in self.joint.dependent for u in users)
            size = 0 if not pinned and _widens(node) else value.bytes
            if pinned and isinstance(node.meta["val"], torch.Tensor):
                size = size or nbytes(node)  # of a sum that is added up in place
            again = IN_KERNEL * memory_bytes(node) + written_by_b * value.bytes
            fusible.append(replace(value, bytes=size, seconds=again, pinned=pinned))
            keeping.append(size * (MEMORY + (not written_by_f) + (not written_by_b)))
        return frozenset(nodes[i] for i in cheapest_way(fusible, wanted, keeping))

    def _users(self, node: Node) -> list[Node]:
        """The operators that need the value, or a view of it, in memory."""
        seen = reach([node], lambda x: x.users if x is node or is_view(x.target) or part_of_view(x) else ())
        return [u for u in seen if u.op == "call_function" and not reads_in_kernel(u.target)]

    def _values(self, layer: LayerTensors) -> tuple[list[Node], list[int], list[RecomputableValue]]:
        """(nodes that may be saved, indices of those that the backward uses, what each costs)."""
        own = [n for n in layer.forward if n in self.joint.made or is_call(n, operator.getitem)]
        own = [n for n in own if not self.joint.is_free(n)]
        taken = [x for x in layer.taken if x not in self.facts.wanted]  # else it is saved anyway
        nodes = [*own, *taken]
        place = {n: i for i, n in enumerate(nodes)}
        wanted = [place[n] for n in own if n in self.facts.wanted]
        values = [
            RecomputableValue(
                self.facts.seconds[n],
                0 if isinstance(n.meta["val"], (tuple, list)) or n in self.joint.always else self.facts.size(n),
                is_pinned(n) or n in self.facts.crossing,
                tuple(place[x] for x in self.facts.sources(n.all_input_nodes) if x in place),
            )
            for n in own
        ]
        values += [RecomputableValue(0.0, self.facts.size(x), pinned=True) for x in taken]
        return nodes, wanted, values

    def _on_host(self, layer: LayerTensors, again: frozenset[Node]) -> list[frozenset[Node]]:
        """Choices of saved values to offload to host memory: none, as many as copies have time for beside other layers,
        all."""
        if not self.facts.offloads:
            return [frozenset()]
        kept = [x for x in self._saved(layer, again)[0] if self.joint.can_offload(x) and x not in layer.taken]
        chosen: list[Node] = []
        for x in sorted(kept, key=lambda x: (-self.facts.size(x), self.joint.order[x])):
            if not self.facts.exposed(layer, [self.facts.size(y) for y in (*chosen, x)]):
                chosen.append(x)
        return list(dict.fromkeys([frozenset(), frozenset(chosen), frozenset(kept)]))

    def _saved(self, layer: LayerTensors, again: frozenset[Node]) -> tuple[list[Node], list[Node]]:
        return self.joint.closure([n for n in layer.forward if n in self.facts.wanted], again | self.joint.always)

    def measured(self, layer: LayerTensors, way: ChosenValues) -> tuple[ChosenValues, RecomputeOption]:
        saved, again = self._saved(layer, way.again)
        hosts = [x for x in saved if x in way.host]
        away = {s for x in hosts for s in self.behind[x]}
        kept = {s for x in saved for s in self.behind[x]}
        own = {s for s in kept if self.facts.layer.get(s[0]) == self.facts.layer[layer.forward[0]]}
        extra = sum(self.facts.size(x) for x in saved if x in layer.taken and x not in self.facts.wanted)
        size, copied = sum(map(size_of, own - away)) + extra, [self.facts.size(x) for x in hosts]
        seconds = sum(self.facts.seconds.get(x, 0.0) for x in again if not self.joint.is_free(x))
        seconds += self.facts.copy_seconds(layer, copied)
        forward = self._forward_peak(layer, own) + extra
        left = self._left_for_w(layer, again, own - away)
        backward = self._backward_peak(layer, set(saved), own, left) + extra
        made = RecomputeOption(size, seconds, forward, backward, sum(map(size_of, left)), sum(copied))
        return ChosenValues(frozenset(x for x in again if x in way.again | self.joint.always), frozenset(hosts)), made

    def _left_for_w(self, layer: LayerTensors, again: Collection[Node], own: Collection[Storage]) -> set[Storage]:
        """Storages of B, or saved by F, that W uses."""
        taken = [x for n in layer.backward if n in self.facts.late for x in n.all_input_nodes]
        gradients = {s for x in taken if x in self.joint.dependent and x not in self.facts.late for s in self.behind[x]}
        values = {s for x in self.facts.sources(taken) if x in again for s in self.behind[x]}
        kept = {s for x in self.facts.sources(taken) for s in self.behind[x] if s in own}
        return gradients | values | kept

    def _forward_peak(self, layer: LayerTensors, saved: Collection[Storage]) -> int:
        """Peak in F. Unsaved values of earlier layers die with their last use; values for later layers stay."""
        facts, i = self.facts, self.facts.layer[layer.forward[0]]
        kept = set(saved) | {s for n in layer.forward if n in facts.crossing for s in self.behind[n]}
        made = [n for n in layer.forward if n in self.joint.made or n in self.joint.parameter_only]
        unsaved = [x for x in layer.taken if x not in facts.wanted]
        given = {s for x in unsaved for s in self.behind[x] if max(facts.in_f[s]) == i}
        return self._peak(made, given, kept)

    def _backward_peak(
        self, layer: LayerTensors, saved: set[Node], own: Collection[Storage], left: Collection[Storage]
    ) -> int:
        """Peak of B, or of B and W in one. Gradients from later layers live until their last use; gradients for earlier
        layers stay, and so does what W uses."""
        run: dict[Node, None] = {}

        def make(x: Node) -> None:
            if x in run or x in saved or x.op != "call_function" or (x in self.joint.dependent and x not in mine):
                return
            if self.facts.layer.get(x, i) != i and not self.joint.is_free(x):
                return  # of another layer, which saves it
            for operand in x.all_input_nodes:
                make(operand)
            run[x] = None

        early = [n for n in layer.backward if n not in self.facts.late]
        mine = set(early)
        i = self.facts.layer[layer.backward[0]] if layer.backward else -1
        for node in early:
            make(node)
        taken = {x for n in early for x in n.all_input_nodes if x in self.joint.dependent and x not in mine}
        given = {s for x in taken if x.op == "call_function" for s in self.behind[x]}
        made = {s for n in early for s in self.behind[n]}
        kept = {s for s in given | made if min(self.facts.in_b.get(s, {i})) < i and s[0] in self.joint.dependent}
        used = {s for n in run for x in n.all_input_nodes for s in self.behind.get(x, ())}
        return self._peak(list(run), given | (used & set(own)), kept | set(left))

    def _peak(self, run: Sequence[Node], given: Collection[Storage], kept: Collection[Storage]) -> int:
        """Most bytes alive at once while nodes run: given storages die after their last use like all others, except for
        those in ``kept``."""
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


def _worth_choosing(
    found: Sequence[tuple[ChosenValues, RecomputeOption]],
) -> list[tuple[ChosenValues, RecomputeOption]]:
    """The options that no other beats in bytes, time and peaks. In order of time."""
    order = sorted(found, key=lambda pair: (pair[1].seconds, pair[1].saved, pair[1].alive))
    kept: list[tuple[ChosenValues, RecomputeOption]] = []
    for way, facts in order:
        if not any(
            k.saved <= facts.saved
            and k.forward <= facts.forward
            and k.backward <= facts.backward
            and k.host <= facts.host
            for _, k in kept
        ):
            kept.append((way, facts))
    return kept


def _widens(node: Node) -> bool:
    """Whether it is a copy in a wider dtype: then the original is kept, in fewer bytes."""
    if node.target is not torch.ops.aten._to_copy.default:
        return False
    return bool(node.meta["val"].itemsize > node.args[0].meta["val"].itemsize)  # type: ignore[union-attr]

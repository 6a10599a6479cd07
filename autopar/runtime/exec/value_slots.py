"""Names of a step's values on one rank: which slot holds what a graph takes, and where gradients come from.

    F takes   a received value       the slot of the stage that made it if that is on this rank, else of its transfer
              a used parameter       what G made of it, or the stored one
              anything else          the prologue's, or a value from outside
    B takes   grad:x of a sent x     the sum over the parts that x went to

A value has one slot per unit (stage, microbatch, slice) of the stage that made it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from autopar.runtime.exec.step_inputs import StepInputs
from autopar.schedule.order import TRANSFERS, Action, Order, P2PEdge
from autopar.steps.graphs import Pipeline, Prologue, Stage, StepGraph, grad, is_a, of
from autopar.steps.of_rank import backwards, comes_back, restricted

Unit = tuple[int, int, int]  # stage, microbatch, slice


def unit_of(action: Action) -> Unit:
    """(stage, microbatch, slice)"""
    return action.stage, action.microbatch, action.slice


class Routes:
    """Which values go from part to part, and which gradients come back."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.parts, self.edges = pipeline, pipeline.parts, pipeline.edges
        self.source = {(h.target, h.value): h for h in self.edges}
        assert len(self.source) == len(self.edges), "a part receives a value once"

    def between(self, source: int, target: int, gradient: bool = False) -> list[P2PEdge]:
        found = [h for h in self.edges if (h.source, h.target) == (source, target)]
        return [h for h in found if comes_back(self.pipeline, h)] if gradient else found

    def users(self, part: int, value: str) -> list[P2PEdge]:
        """Edges that take a value on from a part and bring a gradient back."""
        return [h for h in self.edges if h.source == part and h.value == value and comes_back(self.pipeline, h)]

    def differentiates(self, part: int, value: str) -> bool:
        """Whether a part makes a gradient of a value itself."""
        return any(grad(value) in graph.outputs for graph in backwards(self.parts[part]))

    def drop_empty(self, order: Order) -> Order:
        """A lowered order without the transfers that move nothing."""

        def moves(action: Action) -> bool:
            if action.kind not in TRANSFERS:
                return True
            ends = order.part_of(action.stage), order.part_of(action.peer)
            return bool(self.between(min(ends), max(ends), action.kind[1] == "B"))

        return replace(order, ranks=tuple(tuple(filter(moves, actions)) for actions in order.ranks))

    def parameter_gradients(self, part: int) -> list[str]:
        """Results of a part's backward that are gradients of parameters."""
        kept = {grad(cache.past) for cache in self.parts[part].caches}
        names = dict.fromkeys(name for graph in backwards(self.parts[part]) for name in graph.outputs)
        return [
            name for name in names if is_a(name, "grad") and name not in kept and (part, of(name)) not in self.source
        ]

    def stored_gradients(self, part: int) -> list[tuple[str, str, str]]:
        """(placeholder of a stored parameter, "sum" or "reduced", name of its gradient), of all that a part makes."""
        stage, found = self.parts[part], []
        reduced = stage.backward_reduce or stage.reduce
        if reduced is not None:
            found = [(of(name), "reduced", name) for name in reduced.outputs if name]
        if stage.backward_reduce is not None:
            return found
        done = set(stage.reduce.inputs) if stage.reduce is not None else set()
        for name in self.parameter_gradients(part):
            if name not in done:
                used = of(name)
                found.append((stage.aliases.get(used, used), "sum", name))
        return found


class ValueSlots:
    """Slots by what they hold.

    loads: (slot, placeholder, microbatch) to fill from outside. constants: slot -> value. each, once, totals: the
    prologue's graphs, without what this rank does not need. learned: names of totals that the pre-pass computes.
    """

    def __init__(
        self, pipeline: Pipeline, order: Order, rank: int, inputs: StepInputs, prologue: Prologue | None
    ) -> None:
        self.pipeline, self.order, self.rank, self.inputs = pipeline, order, rank, inputs
        self.routes = Routes(pipeline)
        self.slots: dict[Hashable, int] = {}
        self.loads: list[tuple[int, str, int]] = []
        self.constants: dict[int, Any] = {}
        self.learned = {name for one in pipeline.pre_pass for name in one.totals}
        self.made = [
            frozenset(name for graph in (part.forward, *backwards(part)) for name in graph.outputs)
            for part in pipeline.parts
        ]
        self._restrict(prologue)

    def _restrict(self, prologue: Prologue | None) -> None:
        """The prologue's graphs without what no stage of this rank takes."""
        parts = [self.part(stage) for stage in self.stages()]
        wanted = {name for part in parts for graph in (part.forward, *backwards(part)) for name in graph.inputs}
        self.each = restricted(self.pipeline.each, wanted)
        wanted |= set(self.each.inputs if self.each else ())
        self.once = restricted(self.pipeline.once, wanted)
        wanted |= set(self.once.inputs if self.once else ())
        wanted |= {name for one in self.pipeline.pre_pass for graph in one.graphs if graph for name in graph.inputs}
        totals = StepGraph(prologue.graph, prologue.inputs, list(prologue.totals)) if prologue else None
        self.totals = restricted(totals, wanted)

    def slot(self, *key: Hashable) -> int:
        """The slot of a key, a new one at the first call."""
        return self.slots.setdefault(key, len(self.slots))

    def part(self, stage: int) -> Stage:
        return self.pipeline.parts[self.order.part_of(stage)]

    def stages(self) -> list[int]:
        return [stage for chain in self.order.chains for stage in chain if self.is_mine(stage)]

    def stage_at(self, part: int, microbatch: int) -> int:
        """The stage that runs a part for a microbatch."""
        return self.order.chains[self.order.chain_of[microbatch]][part]

    def is_mine(self, stage: int) -> bool:
        return self.order.rank_of[stage] == self.rank

    # --- values -------------------------------------------------------------------------------------------

    def shared(self, name: str, microbatch: int) -> int:
        """A value that stages share: of the prologue, or from outside."""
        if self.each is not None and name in self.each.outputs:
            return self.slot("microbatch", microbatch, name)
        made = any(graph is not None and name in graph.outputs for graph in (self.once, self.totals))
        if made or name in self.learned:
            return self.slot("step", name)
        varies = self.inputs.varies(name)
        key = ("microbatch", microbatch, name) if varies else ("step", name)
        if key not in self.slots:
            self.loads.append((self.slot(*key), name, microbatch if varies else 0))
        return self.slots[key]

    def value(self, unit: Unit, name: str) -> int:
        """Whatever a graph of a unit takes by name."""
        stage, microbatch, piece = unit
        part, index = self.part(stage), self.order.part_of(stage)
        edge = self.routes.source.get((index, name))
        if edge is not None:
            source = self.stage_at(edge.source, microbatch)
            here = self.is_mine(source)
            return self.value((source, microbatch, piece), name) if here else self.slot("in", *unit, name)
        if name in self.made[index]:
            return self.slot("unit", *unit, name)
        if is_a(name, "sum"):
            return self.slot("sum", stage, grad(of(name)))
        if is_a(name, "grad"):
            return self.tangent(unit, of(name))
        if name in ("slice_start", "slice_length"):
            slot = self.slot(name, piece)
            self.constants[slot] = self.slice(piece)[name == "slice_length"]
            return slot
        if any(name == cache.past for cache in part.caches):
            return self.slot("unit", *unit, name)
        if name in part.gathered:
            return self.slot("used", stage, name)
        return self.shared(part.aliases.get(name, name), microbatch)

    def slice(self, piece: int) -> tuple[int, int]:
        """(start, length) of a token slice."""
        lengths = self.pipeline.token_slices
        assert lengths, "a graph that takes token slices needs their lengths"
        return sum(lengths[:piece]), lengths[piece]

    # --- gradients ----------------------------------------------------------------------------------------

    def tangent(self, unit: Unit, value: str) -> int:
        """The gradient of a value that the unit made: what comes back if that is one, else a slot to be filled."""
        sources = self.arrivals(unit, value)
        cached = any(value == cache.own for cache in self.part(unit[0]).caches)
        return sources[0] if len(sources) == 1 and not cached else self.slot("tangent", *unit, value)

    def arrivals(self, unit: Unit, value: str) -> list[int]:
        """Gradients of a value that come to a unit from the parts it went to."""
        stage, microbatch, piece = unit
        found = []
        for edge in self.routes.users(self.order.part_of(stage), value):
            target = self.stage_at(edge.target, microbatch)
            here = self.is_mine(target)
            there = (target, microbatch, piece)
            found.append(self.upstream(there, value) if here else self.slot("back", *unit, value, edge.target))
        return found

    def upstream(self, unit: Unit, value: str) -> int:
        """The gradient of a received value that goes back."""
        sources = self.upstream_sources(unit, value)
        return sources[0] if len(sources) == 1 else self.slot("upstream", *unit, value)

    def upstream_sources(self, unit: Unit, value: str) -> list[int]:
        """What it is the sum of: the unit's own gradient, and those from parts behind it."""
        own = self.routes.differentiates(self.order.part_of(unit[0]), value)
        return [self.slot("unit", *unit, grad(value))] * own + self.arrivals(unit, value)

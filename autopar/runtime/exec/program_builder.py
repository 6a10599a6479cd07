"""From the lowered order of a step to the instructions of one rank.

1RF0<0    post a receive into new buffers
1F0       wait for it; run F's graph on slots; add its losses up
1SF0>2    send slots
1BW0      wait for gradients; sum what came from several users; run on the sums of earlier gradients of parameters
1BWR1     the same, but the graph makes the reduced gradients
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch

from autopar.ir.graph import outputs, placeholders
from autopar.ir.waits import donated
from autopar.runtime.comm.p2p import Channels
from autopar.runtime.exec.global_statistics import StatisticsProgram
from autopar.runtime.exec.instructions import (
    NOWHERE,
    BoundAction,
    Instruction,
    Program,
    accumulate,
    cast_rows,
    change_rows,
    filled,
    no_sums,
    rows,
    set_lifetimes,
    total,
)
from autopar.runtime.exec.lowering import Lowered
from autopar.runtime.exec.step_inputs import StepInputs
from autopar.runtime.exec.unsharded_cache import gathering
from autopar.runtime.exec.value_slots import Unit, ValueSlots, unit_of
from autopar.schedule.order import Action, Order, P2PEdge
from autopar.schedule.order_checks import acknowledged
from autopar.steps.graphs import Cache, Pipeline, Prologue, StepGraph, grad, is_a, of
from autopar.steps.of_rank import backwards, graph_of

Bind = Callable[[StepGraph, bool], Lowered]


class ProgramBuilder:
    """``order``: lowered, without empty transfers. ``rank``: coordinate on the pp axis. ``bind``: makes a graph
    runnable, also for the first microbatch alone. ``compiled``: whether it compiles them. ``results``: outputs of F to
    keep, of the last microbatch. ``share``: sums values over stages, where there are some. ``over_replicas``: sums
    totals over replicas."""

    def __init__(
        self,
        pipeline: Pipeline,
        order: Order,
        rank: int,
        bind: Bind,
        compiled: bool,
        inputs: StepInputs,
        channels: Channels,
        device: torch.device,
        prologue: Prologue | None,
        results: Collection[str],
        share: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None,
        over_replicas: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    ) -> None:
        self.values = values = ValueSlots(pipeline, order, rank, inputs, prologue)
        self.pre_pass = StatisticsProgram(values, channels, device, self.run, share)
        self.over_replicas = over_replicas
        self.channels, self.device = channels, device
        self.slot, self.part, self.routes, self.order = values.slot, values.part, values.routes, values.order
        self._bind, self.compiled = bind, compiled
        self.bound: dict[tuple[int, bool], Lowered] = {}
        self.tangents: dict[str, list[int]] = {}
        self.losses: dict[str, int] = {}
        self.wanted = results
        self.results: dict[str, int] = {}
        self.stored: dict[str, int] = {}
        self.gathers: set[int] = set()  # stages whose next F gathers
        self.started: set[Hashable] = set()  # microbatches and buffers
        self.acknowledged = acknowledged(self.order, values.rank)
        self.receives: dict[tuple[Hashable, ...], list[Action]] = {}
        for action in self.order.ranks[values.rank]:
            if action.kind in ("RF", "RB"):
                self.receives.setdefault((action.kind, *unit_of(action)), []).append(action)
        self.handlers: dict[str, Callable[[Action, BoundAction], None]] = {
            "F": self.forward, "B": self.backward, "BW": self.backward, "W": self.weights, "BWR": self.backward,
            "SF": self.send, "SB": self.send, "RF": self.receive, "RB": self.receive,
            "G": self.gather, "R": self.reduce,
        }  # fmt: skip

    def program(self) -> Program:
        values = self.values
        entries = [BoundAction(None)]
        self._before_all(entries[0])
        for action in self.order.ranks[values.rank]:
            entries.append(BoundAction(action))
            self.handlers[action.kind](action, entries[-1])
        for stage in values.stages():
            self._store(stage, entries[-1])
        kept = {*self.stored.values(), *self.losses.values(), *self.results.values()}
        set_lifetimes([i for entry in entries for i in (*entry.waits, *entry.instructions)], kept)
        saved = {
            i: key[-1] for key, i in values.slots.items() if isinstance(key, tuple) and is_a(key[-1], "saved", "stash")
        }
        return Program(
            len(values.slots), entries, values.loads, values.constants, self.tangents, self.stored, self.losses,
            self.results, saved,
        )  # fmt: skip

    # --- graphs -------------------------------------------------------------------------------------------

    def bind(self, graph: StepGraph, first: bool = False) -> Lowered:
        key = id(graph), first
        if key not in self.bound:
            self.bound[key] = self._bind(graph, first)
        return self.bound[key]

    def run(
        self, entry: BoundAction, graph: StepGraph, reads: list[int], writes: list[int], first: bool = False
    ) -> None:
        entry.graphs.append(self.bind(graph, first))
        entry.instructions.append(Instruction(entry.graphs[-1], reads, writes))

    def run_unit(self, entry: BoundAction, graph: StepGraph, unit: Unit) -> None:
        first = self._start_sums(entry, graph, unit)
        self.run(entry, graph, *self._unit_slots(graph, unit), first)

    def _start_sums(self, entry: BoundAction, graph: StepGraph, unit: Unit) -> bool:
        """Zeros for the gradients of earlier microbatches that the first backwards take. Whether the graph runs without
        any: its products are the first sums."""
        given = zip(graph.inputs, placeholders(graph.graph), strict=True)
        sums = {self.values.value(unit, name): x.meta["val"] for name, x in given if is_a(name, "sum")}
        missing = {slot: like for slot, like in sums.items() if slot not in self.started}
        if not missing:
            return False
        self.started |= missing.keys()
        in_place = any(donated(node) is not None for node in graph.graph.graph.nodes)
        first = in_place and len(missing) == len(sums) and not self.compiled
        dense = self.compiled or (in_place and not first)  # its code asserts strides, or writes to them
        entry.instructions.append(Instruction(no_sums(missing.values(), self.device, dense), [], [*missing]))
        return first

    def _unit_slots(self, graph: StepGraph, unit: Unit) -> tuple[list[int], list[int]]:
        """(reads, writes) of a graph of a unit."""
        reads = [self.values.value(unit, name) for name in graph.inputs]
        kinds = dict.fromkeys(self.part(unit[0]).gathered, "used")
        kinds |= dict.fromkeys(self.routes.parameter_gradients(self.order.part_of(unit[0])), "sum")
        places = [(kinds[n], unit[0], n) if n in kinds else ("unit", *unit, n) for n in graph.outputs]
        return reads, [NOWHERE if place[-1] is None else self.slot(*place) for place in places]

    def _add(self, entry: BoundAction, addends: list[int], sums: list[int]) -> None:
        entry.instructions.append(Instruction(accumulate, [*sums, *addends], sums))

    def _before_all(self, entry: BoundAction) -> None:
        """Totals over all microbatches, and what is the same for all of them."""
        shared, totals, once = self.values.shared, self.values.totals, self.values.once
        if totals is not None:
            sums = [self.slot("step", name) for name in totals.outputs]
            addends = [self.slot("addend", name) for name in totals.outputs]
            for i in range(self.order.microbatches):
                self.run(entry, totals, [shared(name, i) for name in totals.inputs], addends)
                self._add(entry, addends, sums)
            entry.instructions.append(Instruction(self.over_replicas, sums, sums))
        self.pre_pass.add(entry)
        if once is not None:
            reads = [shared(name, 0) for name in once.inputs]
            self.run(entry, once, reads, [self.slot("step", name) for name in once.outputs])

    def _start_microbatch(self, entry: BoundAction, i: int) -> None:
        each, key = self.values.each, ("microbatch", i)
        if each is not None and key not in self.started:
            self.started.add(key)
            reads = [self.values.shared(name, i) for name in each.inputs]
            self.run(entry, each, reads, [self.slot("microbatch", i, name) for name in each.outputs])

    # --- F ------------------------------------------------------------------------------------------------

    def forward(self, action: Action, entry: BoundAction) -> None:
        unit, part = unit_of(action), self.part(action.stage)
        self._wait(entry, "RF", unit)
        self._start_microbatch(entry, action.microbatch)
        for cache in part.caches:
            buffer, start = self._buffer(entry, unit, cache), self.values.slice(action.slice)[0]
            past = self.values.value(unit, cache.past)
            entry.instructions.append(Instruction(rows(cache.dim, 0, start), [buffer], [past]))
        if action.stage in self.gathers and part.gather_forward is not None:
            self.gathers.remove(action.stage)
            both, alone = (self._unit_slots(graph, unit) for graph in (part.gather_forward, part.forward))
            entry.graphs.append(self.bind(part.gather_forward))
            later = functools.partial(self.bind, part.forward)
            entry.instructions.append(
                gathering(entry.graphs[-1], both, alone, part.gather_forward.outputs, part.gathered, later)
            )
        else:
            self.run_unit(entry, part.forward, unit)
        for cache in part.caches:
            write = change_rows("copy_", cache.dim, *self.values.slice(action.slice))
            buffer, own = self._buffer(entry, unit, cache), self.slot("unit", *unit, cache.own)
            entry.instructions.append(Instruction(write, [buffer, own]))
        for name in part.losses:
            loss = self.losses.setdefault(name, self.slot("loss", name))
            self._add(entry, [self.slot("unit", *unit, name)], [loss])
        if action.microbatch == self.order.microbatches - 1 and action.slice == self.order.slices - 1:
            made = [name for name in part.forward.outputs if name in self.wanted]
            self.results |= {name: self.slot("unit", *unit, name) for name in made if name is not None}

    def _buffer(self, entry: BoundAction, unit: Unit, cache: Cache, gradient: bool = False) -> int:
        """Slot of a cache for the whole sequence, or of its gradient in float32 or wider; zeros at the first use."""
        buffer = self.slot("cache gradient" if gradient else "cache", unit[0], unit[1], cache.own)
        if buffer not in self.started:
            self.started.add(buffer)
            like = self._past(unit, cache)
            whole = sum(self.values.pipeline.token_slices)
            shape = [whole if d == cache.dim % like.dim() else int(size) for d, size in enumerate(like.shape)]
            dtype = torch.promote_types(like.dtype, torch.float32) if gradient else like.dtype
            entry.instructions.append(Instruction(filled(shape, dtype, self.device), [], [buffer]))
        return buffer

    def _past(self, unit: Unit, cache: Cache) -> torch.Tensor:
        """The (fake) value of F's input: its dtype, and its shape apart from the rows."""
        forward = self.part(unit[0]).forward
        past: torch.Tensor = placeholders(forward.graph)[forward.inputs.index(cache.past)].meta["val"]
        return past

    # --- B, BW, W -----------------------------------------------------------------------------------------

    def backward(self, action: Action, entry: BoundAction) -> None:
        unit, part, index = unit_of(action), self.part(action.stage), self.order.part_of(action.stage)
        self._wait(entry, "RB", unit)
        graph, weights = graph_of(part, action.kind), part.backward_weight if action.kind == "B" else None
        assert graph or weights or not backwards(part), f"part {index} has no graph for {action}"
        takes = [name for g in (graph, weights) if g is not None for name in g.inputs]
        for name in dict.fromkeys(takes):
            if is_a(name, "grad") and name not in self.values.made[index]:
                self._make_tangent(entry, unit, of(name))
        if graph is not None and action.kind == "BWR":
            reads = [self.values.value(unit, name) for name in graph.inputs]
            self.run(entry, graph, reads, self._reduced(unit[0], graph))
        elif graph is not None:
            self.run_unit(entry, graph, unit)
            self._add_to_caches(entry, unit, graph)
        for value in (h.value for h in self.routes.edges if h.target == index):
            sources = self.values.upstream_sources(unit, value)
            if len(sources) > 1:
                entry.instructions.append(Instruction(total, sources, [self.values.upstream(unit, value)]))

    def weights(self, action: Action, entry: BoundAction) -> None:
        graph = self.part(action.stage).backward_weight
        if graph is not None:
            self.run_unit(entry, graph, unit_of(action))
            self._add_to_caches(entry, unit_of(action), graph)

    def _make_tangent(self, entry: BoundAction, unit: Unit, value: str) -> None:
        """The gradient of a value that was sent, or kept for later slices."""
        tangent, sources = self.values.tangent(unit, value), self.values.arrivals(unit, value)
        cache = next((c for c in self.part(unit[0]).caches if c.own == value), None)
        if cache is not None:
            assert not sources, f"{value} is kept for later slices and cannot be sent as well"
            cut = cast_rows(cache.dim, *self.values.slice(unit[2]), self._past(unit, cache).dtype)
            entry.instructions.append(Instruction(cut, [self._buffer(entry, unit, cache, gradient=True)], [tangent]))
        elif len(sources) > 1:
            entry.instructions.append(Instruction(total, sources, [tangent]))
        elif is_a(value, "output"):
            self.tangents.setdefault(value, []).append(tangent)
            like = self._like(unit, value)
            if like.dim():
                self.values.constants[tangent] = torch.ones(tuple(like.shape), dtype=like.dtype, device=self.device)
            else:
                self.values.loads.append((tangent, StepInputs.scale(like.dtype), 0))
        elif not sources:
            edge = next(h for h in self.routes.edges if h.value == value)
            entry.instructions.append(Instruction(filled(_shape(edge, unit), edge.dtype, self.device), [], [tangent]))

    def _like(self, unit: Unit, value: str) -> torch.Tensor:
        forward = self.part(unit[0]).forward
        made: torch.Tensor = outputs(forward.graph)[forward.outputs.index(value)].meta["val"]
        return made

    def _add_to_caches(self, entry: BoundAction, unit: Unit, graph: StepGraph) -> None:
        """Gradients of earlier slices add up."""
        for cache in self.part(unit[0]).caches:
            name, start = grad(cache.past), self.values.slice(unit[2])[0]
            if name in graph.outputs and start:
                reads = [self._buffer(entry, unit, cache, gradient=True), self.slot("unit", *unit, name)]
                entry.instructions.append(Instruction(change_rows("add_", cache.dim, 0, start), reads))

    # --- transfers ----------------------------------------------------------------------------------------

    def _moved(self, action: Action) -> list[tuple[P2PEdge, int]]:
        """(edge, slot at this end) of what a transfer moves."""
        unit, here, there = unit_of(action), self.order.part_of(action.stage), self.order.part_of(action.peer)
        between, values = self.routes.between, self.values
        if action.kind == "SF":
            return [(h, values.value(unit, h.value)) for h in between(here, there)]
        if action.kind == "RF":
            return [(h, self.slot("in", *unit, h.value)) for h in between(there, here)]
        if action.kind == "SB":
            return [(h, values.upstream(unit, h.value)) for h in between(there, here, gradient=True)]
        return [(h, self.slot("back", *unit, h.value, h.target)) for h in between(here, there, gradient=True)]

    def send(self, action: Action, entry: BoundAction) -> None:
        start = self.channels.sending(action, self.order.rank_of[action.peer])
        entry.instructions.append(Instruction(start, [slot for _, slot in self._moved(action)]))

    def receive(self, action: Action, entry: BoundAction) -> None:
        """Only posts it: what uses the values waits."""
        kinds = [(_shape(edge, unit_of(action)), edge.dtype) for edge, _ in self._moved(action)]
        post = self.channels.receiving(action, self.order.rank_of[action.peer], kinds)
        entry.instructions.append(Instruction(post, [], [self.slot("pending", action)]))

    def _wait(self, entry: BoundAction, kind: str, unit: Unit) -> None:
        channels = self.channels
        for action in self.receives.get((kind, *unit), []):

            def wait(pending: list[Any], arrived: list[Action] = self.acknowledged.get(action, [])) -> list[Any]:  # noqa: B008
                found = channels.wait(pending[0])
                channels.arrived(arrived)
                return found

            entry.waits.append(Instruction(wait, [self.slot("pending", action)], [s for _, s in self._moved(action)]))

    # --- parameters ---------------------------------------------------------------------------------------

    def gather(self, action: Action, entry: BoundAction) -> None:
        graph = self.part(action.stage).gather
        if self.part(action.stage).gather_forward is not None:
            self.gathers.add(action.stage)  # within the F that follows
        elif graph is not None:
            reads = [self.values.shared(name, 0) for name in graph.inputs]
            self.run(entry, graph, reads, [self.slot("used", action.stage, name) for name in graph.outputs])

    def reduce(self, action: Action, entry: BoundAction) -> None:
        graph = self.part(action.stage).reduce
        if graph is not None:
            reads = [self.slot("sum", action.stage, name) for name in graph.inputs]
            self.run(entry, graph, reads, self._reduced(action.stage, graph))

    def _reduced(self, stage: int, graph: StepGraph) -> list[int]:
        return [NOWHERE if name is None else self.slot("reduced", stage, name) for name in graph.outputs]

    def _store(self, stage: int, entry: BoundAction) -> None:
        """Gradients of stored parameters, summed over the stages of this rank."""
        for name, kind, gradient in self.routes.stored_gradients(self.order.part_of(stage)):
            slot = self.slot(kind, stage, gradient)
            if name in self.stored:
                self._add(entry, [slot], [self.stored[name]])
            else:
                self.stored[name] = slot


def _shape(edge: P2PEdge, unit: Unit) -> tuple[int, ...]:
    return edge.shapes[unit[2] if len(edge.shapes) > 1 else 0]

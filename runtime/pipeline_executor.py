"""Runs a pipeline on this rank: the actions of its lowered order, then what the ranks of the pp axis add up.

    for each action:    wait for what it takes; run it                    (see `pipeline_program`)
    at the end:         gradients of parameters that several ranks hold are summed over these
                        losses are summed over pp; new buffers and outputs go to all ranks; sends have arrived

The same face as `executor.Executor`: `train_step`, and `run_forward` for a model compiled without gradients.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import outputs, set_device
from autopar.ir.parameter import ParameterSpec
from autopar.runtime.bind import Bound, bind
from autopar.runtime.comm import Ledger, Traffic, add_ledgers, all_reduce, broadcast, finish, traffic_of
from autopar.runtime.executor import Result
from autopar.runtime.feed import Feed
from autopar.runtime.groups import Groups
from autopar.runtime.pipeline_program import Entry, Program, make_program
from autopar.runtime.pipeline_values import Routes, unit_of
from autopar.runtime.point_to_point import AXIS, Channels
from autopar.schedule.lowering import lower
from autopar.schedule.order import TRANSFERS, Action, Order
from autopar.steps.graphs import Compiled, Pipeline, Stage, StepGraph


@dataclass
class Peaks:
    """live: most units (stage, micro-batch, slice) between F and B. saved: most bytes of what F and B keep."""

    live: int = 0
    saved: int = 0


class PipelineExecutor:
    """The bound pipeline of one batch shape. ``traffic`` grows with every step.

    All ranks of the world must make theirs at the same time: it makes process groups. record: after a step ``timeline``
    has (action, start, end) in seconds of every action, waiting for other ranks left out. measure: ``peaks`` has the
    most of what was alive at a time (slow).
    """

    def __init__(
        self,
        compiled: Compiled,
        groups: Groups,
        backend: str = "eager",
        *,
        record: bool = False,
        measure: bool = False,
    ) -> None:
        assert compiled.pipeline is not None
        pipeline: Pipeline = compiled.pipeline
        self.compiled, self.groups, self.pipeline, self._backend = compiled, groups, pipeline, backend
        self.feed = Feed(compiled, groups.device)
        self.specs, self.micro_batches = self.feed.specs, self.feed.micro_batches
        self.timeline: list[tuple[Action, float, float]] = []
        self.peaks = Peaks()
        self.record, self._measure = record, measure
        gathers = {i for i, part in enumerate(pipeline.parts) if part.gather is not None}
        reductions = {i for i, part in enumerate(pipeline.parts) if part.reduce is not None}
        order = pipeline.order if pipeline.order.lowered else lower(pipeline.order, pipeline.hops, gathers, reductions)
        self.order = Routes(pipeline).drop_empty(order)
        assert self.order.micro_batches == self.micro_batches, f"{self.order.name} is for other micro-batches"
        self.channels = Channels(groups)
        of = self.order.rank_of
        moves = [a for actions in self.order.ranks for a in actions if a.kind in TRANSFERS]
        self.channels.connect({(of[a.stage], of[a.peer]) for a in moves})
        self._results = results_of(pipeline, self.order, compiled.train)
        me = groups.coordinate[AXIS]
        self.program: Program = make_program(
            pipeline, self.order, me, self._bind, self.feed, self.channels, groups.device, compiled.prologue,
            self._results,
        )  # fmt: skip
        self._shared = SharedGradients(compiled, groups, self.order.rank_of, self.order.chains)
        self._losses = {
            name: kind for part in pipeline.parts for name, (_, kind) in recorded_facts(part, part.losses).items()
        }
        self._own_traffic: Ledger = {}
        self._step_traffic = add_ledgers(*(bound.traffic for bound in self.program.runs))

    def _bind(self, graph: StepGraph) -> Bound:
        if self.groups.device.type != "cpu":
            set_device(graph.graph, self.groups.device)
        return bind(graph.graph, self.groups, self._backend)

    @property
    def traffic(self) -> Ledger:
        """Calls and bytes sent by this rank so far, by (axis, kind)."""
        attention = {bound.comms for bound in self.program.runs}
        return add_ledgers(self._own_traffic, self.channels.traffic, *(comms.traffic for comms in attention))

    # --- a step -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def train_step(self, values: Mapping[str, Tensor]) -> Result:
        """All micro-batches. ``values``: stored parameters of this rank's stages and all buffers by original name,
        inputs by path (all micro-batches of this rank).

        Raises CollectiveError that names the action and the rank it waited for when another rank fails.
        """
        slots, program = self._run(values), self.program
        gradients = {name: slots[i] for name, i in program.gradients.items() if slots[i] is not None}
        gradients = self._shared.sum(gradients, self._count)
        losses = self._sum_losses({name: slots[i] for name, i in program.losses.items()})
        found = {**losses, **self._share_results(slots)}
        return Result(self._outputs(found), gradients, list(losses.values()))

    @torch.no_grad()
    def run_forward(self, values: Mapping[str, Tensor]) -> tuple[list[Any], list[Any]]:
        """(outputs, nothing saved) of a model compiled without gradients, on every rank."""
        assert not self.compiled.train, "a pipeline trains in train_step"
        return self._outputs(self._share_results(self._run(values))), []

    def _outputs(self, found: Mapping[str, Tensor]) -> list[Any]:
        return [found.get(f"output:{i}") for i in range(len(self.compiled.signature.outputs))]

    def _run(self, values: Mapping[str, Tensor]) -> list[Any]:
        """The slots after all actions."""
        slots = self._filled(values)
        self.channels.clear()
        if self.record or self._measure:
            self._run_watched(slots)
        else:
            for entry in self.program.entries:
                for instruction in entry.waits:
                    instruction.run(slots)
                for instruction in entry.does:
                    instruction.run(slots)
        self.channels.flush()
        self._own_traffic = add_ledgers(self._own_traffic, self._step_traffic)
        return slots

    def _filled(self, values: Mapping[str, Tensor]) -> list[Any]:
        """New slots with what comes from outside."""
        slots: list[Any] = [None] * self.program.size
        for slot, constant in self.program.constants.items():
            slots[slot] = constant
        for slot, name, micro_batch in self.program.loads:
            slots[slot] = self.feed.value(name, values, micro_batch)
        return slots

    def _run_watched(self, slots: list[Any]) -> None:
        self.timeline, self.peaks = [], Peaks()
        live: set[tuple[int, int, int]] = set()
        for entry in self.program.entries:
            for instruction in entry.waits:
                instruction.run(slots)
            start = time.perf_counter()
            for instruction in entry.does:
                instruction.run(slots)
            if entry.action is not None and self.record:
                self.timeline.append((entry.action, start, time.perf_counter()))
            if entry.action is not None and self._measure:
                self._look(entry, slots, live)

    def _look(self, entry: Entry, slots: list[Any], live: set[tuple[int, int, int]]) -> None:
        action = entry.action
        assert action is not None
        if action.kind == "F":
            live.add(unit_of(action))
            self.peaks.live = max(self.peaks.live, len(live))
        elif action.kind in ("B", "BW"):
            live.discard(unit_of(action))
        kept = [slots[i] for i in self.program.saved if isinstance(slots[i], Tensor)]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
        self.peaks.saved = max(self.peaks.saved, sum(storages.values()))

    def _count(self, axis: str, kind: str, sent: int) -> None:
        self._own_traffic = add_ledgers(self._own_traffic, {(axis, kind): Traffic(1, sent)})

    # --- over the pp axis ---------------------------------------------------------------------------------

    def _sum_losses(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every rank has all losses; they travel as one vector of float64."""
        if not self._losses:
            return {}
        vector = torch.zeros(len(self._losses), dtype=torch.float64, device=self.groups.device)
        for i, name in enumerate(self._losses):
            if name in own:
                vector[i] = own[name]
        total = finish(all_reduce(self.groups, "losses", AXIS, "sum", in_place=True)(vector))
        self._count(AXIS, "all_reduce", traffic_of("all_reduce", vector.shape, vector.dtype, self.groups.size(AXIS)))
        return {name: x.to(dtype) for (name, dtype), x in zip(self._losses.items(), total.unbind(), strict=True)}

    def _share_results(self, slots: list[Any]) -> dict[str, Tensor]:
        """New buffers and outputs, from the ranks that made them."""
        pending = {}
        for name, (source, shape, dtype) in self._results.items():
            mine = source == self.groups.coordinate[AXIS]
            if mine:
                x = slots[self.program.results[name]]
            else:
                x = torch.empty(shape, dtype=dtype, device=self.groups.device)
            pending[name] = broadcast(self.groups, name, AXIS, source)(x)
            self._count(AXIS, "broadcast", x.nbytes * mine)
        return {name: finish(p) for name, p in pending.items()}


class SharedGradients:
    """Sums the gradients of parameters that several ranks of the pp axis hold, over exactly these: tied weights of
    several parts, and both copies of a part under dual_pipe."""

    def __init__(
        self, compiled: Compiled, groups: Groups, rank_of: Sequence[int], chains: Sequence[Sequence[int]]
    ) -> None:
        assert compiled.pipeline is not None
        self._groups = groups
        self._specs = {p.name: p for p in compiled.parameters}
        nodes = {s.name: s.node for s in compiled.local.meta["signature"].inputs if s.kind == "parameter"}
        parts, routes = compiled.pipeline.parts, Routes(compiled.pipeline)
        made = {name for i in range(len(parts)) for name, _, _ in routes.stored_gradients(i)}
        self._buckets: list[tuple[str, list[tuple[str, ParameterSpec]]]] = []
        together: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[str, ParameterSpec]]] = {}
        for name, spec in self._specs.items():
            holders = {rank_of[chain[i]] for i, p in enumerate(parts) if name in p.parameters for chain in chains}
            if len(holders) > 1 and nodes[name] in made:
                together.setdefault((tuple(sorted(holders)), spec.dtype), []).append((nodes[name], spec))
        for (coordinates, _), members in together.items():
            axis = groups.subset(AXIS, coordinates)  # on all ranks
            if groups.coordinate[AXIS] in coordinates:
                for bucket in self._cut(members, compiled.plan.options.bucket_bytes):
                    self._buckets.append((axis, bucket))

    def _cut(self, members: list[tuple[str, ParameterSpec]], most: int) -> list[list[tuple[str, ParameterSpec]]]:
        """Buckets of at most ``most`` bytes (or one gradient)."""
        found: list[list[tuple[str, ParameterSpec]]] = []
        room = 0
        for node, spec in members:
            size = spec.nbytes(self._groups.mesh)
            if not found or size > room:
                found.append([])
                room = most
            found[-1].append((node, spec))
            room -= size
        return found

    def sum(self, gradients: dict[str, Tensor], count: Any) -> dict[str, Tensor]:
        """Gradients by placeholder of the stored parameter; one that this rank lacks counts as zero. ``count`` is told
        (axis, kind, bytes)."""
        pending = []
        for axis, bucket in self._buckets:
            pieces = [self._piece(gradients, node, spec) for node, spec in bucket]
            flat = torch.cat([x.reshape(-1) for x in pieces]) if len(pieces) > 1 else pieces[0].contiguous()
            name = f"gradient of {bucket[0][1].name}"
            pending.append(all_reduce(self._groups, name, axis, "sum", in_place=True)(flat))
            sent = traffic_of("all_reduce", flat.shape, flat.dtype, self._groups.size(axis))
            count(AXIS, "all_reduce", sent)
        out = dict(gradients)
        for (_, bucket), work in zip(self._buckets, pending, strict=True):
            shapes = [spec.local_shape(self._groups.mesh) for _, spec in bucket]
            sizes = [torch.Size(shape).numel() for shape in shapes]
            pieces = torch.ops.aten.split_with_sizes_copy(finish(work).view(-1), sizes)  # none keeps the bucket alive
            for (node, _), x, shape in zip(bucket, pieces, shapes, strict=True):
                out[node] = x.view(shape)
        return out

    def _piece(self, gradients: Mapping[str, Tensor], node: str, spec: ParameterSpec) -> Tensor:
        found = gradients.get(node)
        if found is None:
            return torch.zeros(spec.local_shape(self._groups.mesh), dtype=spec.dtype, device=self._groups.device)
        return found.to(spec.dtype)


def recorded_facts(part: Stage, names: Collection[str]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of some outputs of a part's F."""
    made = zip(part.forward.outputs, outputs(part.forward.graph), strict=True)
    values = {name: node.meta["val"] for name, node in made if name is not None and name in names}
    return {name: (tuple(val.shape), val.dtype) for name, val in values.items()}


def results_of(pipeline: Pipeline, order: Order, train: bool) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
    """Output of F -> coordinate of the rank that makes it for the last micro-batch, shape, type: of the new buffers in
    training, of everything that the model returns otherwise."""
    last = order.chains[order.chain_of[-1]]
    found = {}
    for index, part in enumerate(pipeline.parts):
        names = [
            n for n in part.forward.outputs if n in part.mutations or (not train and n and n.startswith("output:"))
        ]
        for name, facts in recorded_facts(part, [n for n in names if n]).items():
            found[name] = (order.rank_of[last[index]], *facts)
    return found


Recording = Sequence[tuple[Action, float, float]]  # (action, start, end) in seconds


def per_rank(recorded: Iterable[tuple[Mapping[str, int], Recording]]) -> list[Recording]:
    """What to draw of what all ranks of the world recorded, as (coordinate on the mesh, actions) pairs: for every
    coordinate on pp the first rank, whose other coordinates are 0."""
    first = {where["pp"]: actions for where, actions in recorded if not any(i for a, i in where.items() if a != "pp")}
    return [first[i] for i in sorted(first)]

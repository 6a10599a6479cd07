"""The plan of a pipeline: schedule, cuts, token slices, and who holds which parameter; and the order of its actions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from torch.fx import GraphModule, Node

from autopar.conversions import is_conversion
from autopar.flops import DEFAULT, Device, seconds_of
from autopar.flow import Flow, flow_of
from autopar.graph import ancestors, nbytes, placeholders
from autopar.memory import is_view, optimizer_bytes, storage_bytes
from autopar.mesh import Mesh
from autopar.parameter import ParameterSpec
from autopar.plan import Options, PipelinePlan, Plan
from autopar.planner.balance import UnitCosts, balance
from autopar.planner.parts import Unit, parts_by_node, resolve, units_of
from autopar.runtime.schedules.choose import chosen
from autopar.schedule import SCHEDULES, Action, Costs, Hop, Order, Request, Schedule
from autopar.steps import Stage, StepGraph

MOST_CHUNKS = 2  # parts per rank that the plan considers when it chooses the schedule


def plan_pipeline(
    gm: GraphModule, mesh: Mesh, options: Options, specs: Sequence[ParameterSpec], fixed: PipelinePlan | None = None
) -> tuple[PipelinePlan, list[tuple[str, str]]]:
    """(plan, notes) for a normalised global graph on a mesh with pp. ``fixed``: an earlier plan of the same model; its
    cuts and schedule are kept, so that every rank keeps its parameters.

    Raises ValueError for unknown schedules and cuts, and more parts than layers.
    """
    planner = _Planner(gm, mesh, options, specs)
    if fixed is not None:
        return replace(fixed, holders=planner.holders(fixed.cuts)), []
    name, notes = planner.schedule()
    entry = SCHEDULES[name]
    chunks = options.chunks or entry.chunks
    cuts, costs = planner.cut(mesh.size("pp") * chunks, entry)
    if options.cuts:
        notes.append(("pipeline", f"cuts {', '.join(cuts)}: the user's choice"))
    else:
        times = " ".join(f"{t / max(costs):.2f}" for t in costs)
        notes.append(("pipeline", f"cuts {', '.join(cuts)}: times of the parts relative to the largest {times}"))
    return PipelinePlan(name, cuts, chunks, (), planner.holders(cuts)), notes


class _Planner:
    def __init__(self, gm: GraphModule, mesh: Mesh, options: Options, specs: Sequence[ParameterSpec]) -> None:
        self.gm, self.mesh, self.options = gm, mesh, options
        self.flow: Flow = flow_of(gm)
        self.specs = {s.name: s for s in specs}
        self.names = {s.node: s.name for s in gm.meta["signature"].inputs if s.kind == "parameter"}
        self.main = [n for n in self.flow.main if not is_conversion(n)]

    def schedule(self) -> tuple[str, list[tuple[str, str]]]:
        """The user's schedule, or the fastest by simulation."""
        ranks = self.mesh.size("pp")
        if self.options.schedule:
            self._check_schedule(SCHEDULES[self.options.schedule])
            return self.options.schedule, []
        if self.options.slices:
            return "seq1f1b", [("pipeline", "schedule seq1f1b: token slices were asked for")]
        if self.options.chunks > 1:
            return "interleaved", [("pipeline", f"schedule interleaved: {self.options.chunks} chunks were asked for")]
        if len(self.options.cuts) + 1 != ranks and self.options.cuts:
            raise ValueError(
                f"pipeline: {len(self.options.cuts)} cuts make {len(self.options.cuts) + 1} parts, axis 'pp' has size "
                f"{ranks}; name the schedule that runs so many parts (interleaved, zb_v, ...), or give {ranks - 1} cuts"
            )
        costs: dict[int, Costs] = {}
        for chunks in range(1, 1 if self.options.cuts else MOST_CHUNKS + 1):
            try:
                _, times = self.cut(ranks * chunks, SCHEDULES["1f1b"])
            except ValueError:
                if chunks == 1:
                    raise
                continue
            shares = math.prod(self.mesh.size(axis) for axis in ("dp", "tp")) * self.options.micro_batches
            t = tuple(time / shares for time in times)
            costs[chunks] = Costs(t, t, t, activations=t, stash=tuple(x / 2 for x in t))
        if self.options.cuts:
            costs[1] = Costs()
        name, reason = chosen(ranks, self.options.micro_batches, costs)
        return name, [("pipeline", f"schedule {name}: {reason}")]

    def _check_schedule(self, entry: Schedule) -> None:
        """Numbers that the schedule does not take are refused before anything is compiled."""
        if self.options.slices and not entry.sliced:
            sliced = " or ".join(name for name, other in SCHEDULES.items() if other.sliced)
            raise ValueError(
                f"schedule: {entry.name} runs whole micro-batches, found slices={self.options.slices}; use "
                f"{sliced}, or leave slices out"
            )
        if not entry.searches:
            chunks = self.options.chunks or entry.chunks
            entry.make(Request(self.mesh.size("pp"), self.options.micro_batches, chunks))

    def cut(self, parts: int, entry: Schedule) -> tuple[tuple[str, ...], list[float]]:
        """Names of the units that begin further parts, and the time of each part."""
        if self.options.cuts:
            if len(self.options.cuts) != parts - 1:
                raise ValueError(
                    f"pipeline: {parts} parts need {parts - 1} cuts, found {len(self.options.cuts)}; name the module "
                    "with which each part but the first begins"
                )
            units, starts = resolve(self.main, self.options.cuts)
        else:
            units = units_of(self.main, parts)
            starts = self._balanced(units, parts, entry)
        ends = [*starts[1:], len(units)]
        times = [seconds_of(n for u in units[a:b] for n in u.nodes) for a, b in zip(starts, ends, strict=True)]
        return tuple(units[s].name for s in starts[1:]), times

    def _balanced(self, units: Sequence[Unit], parts: int, entry: Schedule) -> list[int]:
        """First unit of each part: the least time of the slowest part, within the memory limit."""
        counts = balance(
            self._costs(units),
            parts,
            sent=self._crossing(units),
            in_flight=in_flight(entry, self.mesh.size("pp"), parts, self.options.micro_batches),
            limit=self.options.memory_limit or None,
            rank_of_part=mirrored(entry, self.mesh.size("pp"), parts),
        )
        return [0, *accumulate(counts)][:-1]

    def _costs(self, units: Sequence[Unit]) -> list[UnitCosts]:
        """Time of the forward (the backward takes a multiple of it), parameters where they are first used, and what
        every operation makes as activations: an estimate from above."""
        seen: set[str] = set()
        out = []
        shares = self.mesh.size("dp") * self.options.micro_batches
        for unit in units:
            names = {self.names[x.name] for n in unit.nodes for x in self._parameters_behind(n)} - seen
            seen |= names
            made = sum(nbytes(n) for n in unit.nodes if not is_view(n))
            static = static_bytes(self.specs, sorted(names), self.mesh)
            out.append(UnitCosts(seconds_of(unit.nodes), static, made // shares))
        return out

    def _crossing(self, units: Sequence[Unit]) -> list[int]:
        """Bytes of main values that pass each boundary between units."""
        at = {n: i for i, unit in enumerate(units) for n in unit.nodes}
        changes = [0] * (len(units) + 1)
        for node, first in at.items():
            last = max((at[u] for u in node.users if u in at), default=first)
            changes[first] += nbytes(node)
            changes[last] -= nbytes(node)
        return list(accumulate(changes))[: len(units) - 1]

    def holders(self, cuts: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
        """Parameter -> the parts that use it; () for one that no part uses."""
        part_of = parts_by_node(*resolve(self.main, cuts))
        found: dict[str, set[int]] = {name: set() for name in self.names.values()}
        for node, part in part_of.items():
            for x in self._parameters_behind(node):
                found[self.names[x.name]].add(part)
        return {name: tuple(sorted(parts)) for name, parts in found.items()}

    def _parameters_behind(self, node: Node) -> list[Node]:
        """Parameters that a main node takes, directly or through values that depend on parameters alone."""
        sources = [x for x in node.all_input_nodes if x in self.flow.parameter_only]
        return [x for x in ancestors(sources) if x.name in self.names]


def main_parts(gm: GraphModule, cuts: tuple[str, ...]) -> list[list[Node]]:
    """The main nodes of each part of a global graph."""
    part_of = parts_by_node(*resolve([n for n in flow_of(gm).main if not is_conversion(n)], cuts))
    return [[n for n, part in part_of.items() if part == k] for k in range(len(cuts) + 1)]


def in_flight(entry: Schedule, ranks: int, parts: int, micro_batches: int) -> list[int]:
    """Micro-batches that every part holds at once, as 1F1B does: fewer towards the end; all of them under AFAB."""
    if entry.name in ("gpipe", "tera_pipe"):
        return [micro_batches] * parts
    return [max(1, min(micro_batches, ranks - k * ranks // parts)) for k in range(parts)]


def mirrored(entry: Schedule, ranks: int, parts: int) -> list[int]:
    """The rank of each part; one number for the two ranks that hold both of two mirrored parts."""
    order = entry.make(Request(ranks, 2 * parts, parts // ranks))
    by_part = [sorted(order.rank_of[chain[k]] for chain in order.chains) for k in range(parts)]
    return [ranks_of[0] for ranks_of in by_part]


# --- the order of actions --------------------------------------------------------------------------------


def make_order(plan: Plan, parts: Sequence[Stage], hops: Sequence[Hop], train: bool = True, static: int = 0) -> Order:
    """The compute actions of a step. ``static``: bytes of the rank with most parameters and states, of which the
    memory limit leaves the rest to activations.

    Raises ValueError where the schedule does not take the number of micro-batches.
    """
    assert plan.pipeline is not None
    pipeline = plan.pipeline
    entry = SCHEDULES[pipeline.schedule]
    costs = costs_of(parts, hops, plan.mesh)
    limit = float(plan.options.memory_limit - static) if plan.options.memory_limit else None
    slices = max(len(pipeline.slices), 1)
    request = Request(plan.mesh.size("pp"), plan.options.micro_batches, pipeline.chunks, slices, costs, limit)
    if train:
        return entry.make(request)
    return forward_order(entry.make(replace(request, micro_batches=least_micro_batches(pipeline, plan.mesh))))


def forward_order(order: Order) -> Order:
    """F of one micro-batch along the first chain: for evaluation."""
    rows: list[list[Action]] = [[] for _ in order.ranks]
    for stage in order.chains[0]:
        rows[order.rank_of[stage]].append(Action(stage, "F", 0))
    return Order("forward", tuple(map(tuple, rows)), order.chains, order.rank_of, (0,))


def layout(pipeline: PipelinePlan, mesh: Mesh) -> Order:
    """Chains and ranks of a schedule's stages, on as few micro-batches as it takes."""
    ranks = mesh.size("pp")
    slices = max(len(pipeline.slices), 1)
    request = Request(ranks, least_micro_batches(pipeline, mesh), pipeline.chunks, slices)
    return SCHEDULES[pipeline.schedule].make(request)


def least_micro_batches(pipeline: PipelinePlan, mesh: Mesh) -> int:
    """A number of micro-batches that any schedule takes."""
    return 2 * mesh.size("pp") * pipeline.chunks


def owners(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Parameter -> the coordinates on pp that hold it, its owner first. One that no part uses lives on the first."""
    if plan.pipeline is None:
        return {}
    order = layout(plan.pipeline, plan.mesh)
    found = {}
    for name, parts in plan.pipeline.holders.items():
        ranks = {order.rank_of[chain[k]] for chain in order.chains for k in parts}
        found[name] = tuple(sorted(ranks)) or (0,)
    return found


def costs_of(parts: Sequence[Stage], hops: Sequence[Hop], mesh: Mesh | None = None, device: Device = DEFAULT) -> Costs:
    """Seconds and bytes of every part's actions, estimated from its step graphs.

    ``mesh``: gathers and reductions take the time of their transfers. (Those of tp inside of F, B and W take none:
    their links are many times faster, and a device has one speed here.)
    """

    def time(graph: StepGraph | None, mesh: Mesh | None = None) -> float:
        return seconds_of(graph.graph.graph.nodes, device, mesh) if graph is not None else 0.0

    received = [sum(_hop_bytes(h) for h in hops if h.target == k) for k in range(len(parts))]
    comm = max((device.latency + _hop_bytes(h) / device.link for h in hops), default=0.0)
    return Costs(
        F=tuple(time(p.forward) for p in parts),
        B=tuple(time(p.backward_input) for p in parts),
        W=tuple(time(p.backward_weight) for p in parts),
        comm=comm,
        G=tuple(time(p.gather, mesh) for p in parts),
        R=tuple(time(p.reduce, mesh) for p in parts),
        activations=tuple(float(kept(p) + r) for p, r in zip(parts, received, strict=True)),
        stash=tuple(float(_taken(p.backward_weight)) for p in parts),
    )


def kept(part: Stage) -> int:
    """Bytes that F of a part keeps for its backward, without what it received."""
    names = part.forward.outputs
    return storage_bytes(part.forward.graph, [i for i, n in enumerate(names) if n and n.startswith("saved:")])


def _taken(step: StepGraph | None) -> int:
    """Bytes that W takes over from F and B."""
    if step is None:
        return 0
    nodes = dict(zip(step.inputs, placeholders(step.graph), strict=True))
    return sum(nbytes(n) for name, n in nodes.items() if name.startswith(("saved:", "stash:")))


def _hop_bytes(hop: Hop) -> int:
    return sum(math.prod(shape) for shape in hop.shapes) * hop.dtype.itemsize


def most_static(specs: Sequence[ParameterSpec], mesh: Mesh) -> int:
    """`static_bytes` of the coordinate on pp that holds most."""
    by_name = {s.name: s for s in specs}
    held = ([s.name for s in specs if r in s.ranks] for r in range(mesh.size("pp")))
    return max(static_bytes(by_name, names, mesh) for names in held)


def static_bytes(specs: Mapping[str, ParameterSpec], names: Sequence[str], mesh: Mesh) -> int:
    """Parameters, gradients and optimizer states of one rank."""
    held = [specs[n] for n in names]
    return sum(p.nbytes(mesh) * (2 if p.requires_grad else 1) for p in held) + sum(
        optimizer_bytes(p, mesh) for p in held if p.requires_grad
    )

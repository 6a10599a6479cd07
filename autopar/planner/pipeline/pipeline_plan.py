"""The plan of a pipeline: schedule, split points, and which stages hold which parameter."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from torch.fx import GraphModule, Node

import autopar.runtime.schedules  # noqa: F401  (fills the table of schedules)
from autopar.ac_policies import AUTO
from autopar.cost.flops import node_seconds
from autopar.cost.hardware import Links, device_of
from autopar.cost.memory import static_bytes
from autopar.ir.conversions import is_conversion
from autopar.ir.flow import Flow, flow_of, home_of
from autopar.ir.graph import ancestors, described_at, nbytes, outputs
from autopar.ir.mesh import Mesh
from autopar.ir.meta import names_of_parameters, signature_of
from autopar.ir.signature import ParameterSpec
from autopar.ir.storages import shares_storage
from autopar.options import Options
from autopar.plan import PipelinePlan
from autopar.planner.pipeline.split_candidates import LEVELS, Unit, parts_by_node, resolve, units_at, units_of
from autopar.planner.pipeline.stage_balance import UnitCosts, balance
from autopar.planner.pipeline.step_order import layout, owners_of
from autopar.schedule.request import SCHEDULES, Costs, Request, Schedule
from autopar.schedule.simulate import Timeline, simulate

MOST_CHUNKS = 2  # virtual stages per rank that the plan considers when it chooses the schedule


def plan_pipeline(
    gm: GraphModule,
    mesh: Mesh,
    options: Options,
    specs: Sequence[ParameterSpec],
    fixed: PipelinePlan | None = None,
    placed: bool = False,
) -> tuple[PipelinePlan, list[tuple[str, str]]]:
    """(plan, notes) for a normalised global graph on a mesh with pp. ``fixed``: an earlier plan of the same model; its
    split points and schedule are kept. ``placed``: ranks already hold parameters as ``fixed`` says; none may move.

    Raises ValueError for unknown schedules and split points, more stages than layers, and parameters that would move.
    """
    planner = _Planner(gm, mesh, options, specs)
    if fixed is not None:
        cuts = kept_cuts(planner.main, planner.weights, fixed, mesh) if placed else fixed.split_points
        holders = planner.holders(cuts) | (dict(fixed.holders) if placed else {})
        return replace(fixed, split_points=cuts, holders=holders), []
    name, notes = planner.schedule()
    entry = SCHEDULES[name]
    if entry.sliced and mesh.size("cp") > 1:
        raise ValueError(
            f'pipeline: the schedule {name} slices the sequence in time, and the axis "cp" shards it over ranks, so '
            "keys of earlier slices would be on other ranks; use a schedule without token slices, or no axis cp"
        )
    chunks = options.virtual_stages or entry.virtual_stages
    cuts, costs, _ = planner.cut(mesh.size("pp") * chunks, entry)
    if options.split_points:
        notes.append(("pipeline", f"split points {', '.join(cuts)}: the user's choice"))
    else:
        times = " ".join(f"{t / max(costs):.2f}" for t in costs)
        notes.append(
            ("pipeline", f"split points {', '.join(cuts)}: times of the stages relative to the largest {times}")
        )
    return PipelinePlan(name, cuts, chunks, (), planner.holders(cuts)), notes


class _Planner:
    def __init__(self, gm: GraphModule, mesh: Mesh, options: Options, specs: Sequence[ParameterSpec]) -> None:
        self.gm, self.mesh, self.options = gm, mesh, options
        self.flow: Flow = flow_of(gm)
        self.specs = {s.name: s for s in specs}
        self.names = names_of_parameters(gm)
        self.main = [n for n in self.flow.main if not is_conversion(n)]
        self.weights = functools.cache(self._parameters_behind)
        # Seconds of a node. Cached, because each number of stages asks for them.
        self.seconds = functools.cache(functools.partial(node_seconds, device=device_of(options)))

    def schedule(self) -> tuple[str, list[tuple[str, str]]]:
        """(the user's schedule, or the fastest by simulation; notes)."""
        ranks = self.mesh.size("pp")
        if self.options.schedule:
            self._check_schedule(SCHEDULES[self.options.schedule])
            return self.options.schedule, []
        if self.options.token_slices:
            return "seq1f1b", [("pipeline", "schedule seq1f1b: token slices were requested")]
        if self.options.virtual_stages > 1:
            return "interleaved", [
                ("pipeline", f"schedule interleaved: {self.options.virtual_stages} virtual stages were requested")
            ]
        if len(self.options.split_points) + 1 != ranks and self.options.split_points:
            raise ValueError(
                f"pipeline: {len(self.options.split_points)} split points make {len(self.options.split_points) + 1} "
                f"stages, axis 'pp' has size {ranks}; name a schedule with virtual stages (interleaved, zb_v, ...), or "
                f"give {ranks - 1} split points"
            )
        costs: dict[int, Costs] = {}
        for chunks in range(1, 1 if self.options.split_points else MOST_CHUNKS + 1):
            try:
                _, times, sent = self.cut(ranks * chunks, SCHEDULES["1f1b"])
            except ValueError:
                if chunks == 1:
                    raise
                continue
            shares = self.mesh.data_size * self.mesh.size("tp") * self.options.all_microbatches
            t = tuple(time / shares for time in times)
            comm = Links.of(self.options, self.mesh).seconds("pp", "send", sent / shares * self.mesh.size("tp"))
            costs[chunks] = Costs(t, t, t, comm=comm, activations=t, stash=tuple(x / 2 for x in t))
        if self.options.split_points:
            costs[1] = Costs()
        name, reason = chosen(ranks, self.options.microbatches, costs)
        return name, [("pipeline", f"schedule {name}: {reason}")]

    def _check_schedule(self, entry: Schedule) -> None:
        """Refuse numbers that the schedule does not support before anything is compiled. Raises ValueError."""
        if self.options.token_slices and not entry.sliced:
            sliced = " or ".join(name for name, other in SCHEDULES.items() if other.sliced)
            raise ValueError(
                f"schedule: {entry.name} runs whole microbatches, found token_slices={self.options.token_slices}; use "
                f"{sliced}, or leave token_slices out"
            )
        if not entry.searches:
            chunks = self.options.virtual_stages or entry.virtual_stages
            entry.make(Request(self.mesh.size("pp"), self.options.microbatches, chunks))

    def cut(self, parts: int, entry: Schedule) -> tuple[tuple[str, ...], list[float], int]:
        """(split points: the unit with which each later part begins; time of each part; most bytes between two)."""
        if self.options.split_points:
            if len(self.options.split_points) != parts - 1:
                raise ValueError(
                    f"pipeline: {parts} stages need {parts - 1} split points, found {len(self.options.split_points)}; "
                    "name the module with which each stage but the first begins"
                )
            units, starts = resolve(self.main, self.options.split_points)
        else:
            units = units_of(self.main, parts)
            starts = self._balanced(units, parts, entry)
        ends = [*starts[1:], len(units)]
        times = [sum(map(self._seconds_of, units[a:b])) for a, b in zip(starts, ends, strict=True)]
        crossing = self._crossing(units)
        return tuple(units[s].name for s in starts[1:]), times, max(crossing[s - 1] for s in starts[1:])

    def _balanced(self, units: Sequence[Unit], parts: int, entry: Schedule) -> list[int]:
        """First unit of each part, such that the slowest part is as fast as possible within the memory limit."""
        costs = self._costs(units)
        facts: dict[str, Any] = {
            "sent": self._crossing(units),
            "in_flight": in_flight(entry, self.mesh.size("pp"), parts, self.options.microbatches),
            "limit": self.options.memory_limit or None,
            "rank_of_part": mirrored(entry, self.mesh.size("pp"), parts),
        }
        tries = [(costs, facts)]
        if self.options.ac_policy == AUTO:  # a unit's input is kept, the rest can be recomputed
            shares = self.mesh.data_size * self.options.microbatches
            given = [0, *(size // shares for size in facts["sent"])]
            tries = [([replace(c, activations=size) for c, size in zip(costs, given, strict=True)], facts)]
            tries.append((costs, {**facts, "limit": None}))  # if nothing fits, the error counts all activations
        counts = _first_that_works([partial(balance, units, parts, **how) for units, how in tries])
        return [0, *accumulate(counts)][:-1]

    def _costs(self, units: Sequence[Unit]) -> list[UnitCosts]:
        """Per unit: time of the forward (the backward takes a multiple of it), bytes of the parameters first used in
        it, and as activations the results of all operations, which is an upper bound."""
        seen: set[str] = set()
        out = []
        shares = self.mesh.data_size * self.options.microbatches
        for unit in units:
            names = {name for n in unit.nodes for name in self.weights(n)} - seen
            seen |= names
            made = sum(nbytes(n) for n in unit.nodes if not shares_storage(n))
            static = static_bytes(self.specs, sorted(names), self.mesh, self.options)
            out.append(UnitCosts(self._seconds_of(unit), static, made // shares))
        return out

    def _seconds_of(self, unit: Unit) -> float:
        return math.fsum(map(self.seconds, unit.nodes))

    def _crossing(self, units: Sequence[Unit]) -> list[int]:
        """Bytes of main values that cross each boundary between units."""
        at = {n: i for i, unit in enumerate(units) for n in unit.nodes}
        changes = [0] * (len(units) + 1)
        for node, first in at.items():
            last = max((at[u] for u in node.users if u in at), default=first)
            changes[first] += nbytes(node)
            changes[last] -= nbytes(node)
        return list(accumulate(changes))[: len(units) - 1]

    def holders(self, cuts: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
        """Parameter -> the parts that use it, or compute its new value or that of another with it; () if none does."""
        part_of = parts_by_node(*resolve(self.main, cuts))
        found: dict[str, set[int]] = {name: set() for name in self.names.values()}
        for node, part in part_of.items():
            for name in self.weights(node):
                found[name].add(part)
        for spec, value in zip(signature_of(self.gm).outputs, outputs(self.gm), strict=True):
            if spec.kind == "mutation" and value in self.flow.parameter_only:
                home = home_of(value, part_of, self.flow)
                for name in (self.names[x.name] for x in ancestors([value]) if x.name in self.names):
                    found[name].add(len(cuts) if home is None else home)
        return {name: tuple(sorted(parts)) for name, parts in found.items()}

    def _parameters_behind(self, node: Node) -> list[str]:
        """Parameters that a main node reads, directly or through values that depend on parameters alone."""
        sources = [x for x in node.all_input_nodes if x in self.flow.parameter_only]
        return [self.names[x.name] for x in ancestors(sources) if x.name in self.names]


def main_parts(gm: GraphModule, cuts: tuple[str, ...]) -> list[list[Node]]:
    """The main nodes of each part of a global graph."""
    part_of = parts_by_node(*resolve([n for n in flow_of(gm).main if not is_conversion(n)], cuts))
    return [[n for n, part in part_of.items() if part == k] for k in range(len(cuts) + 1)]


def in_flight(entry: Schedule, ranks: int, parts: int, microbatches: int) -> list[int]:
    """Microbatches in flight per part, as under 1F1B: fewer towards the end; all of them under GPipe and TeraPipe."""
    if entry.name in ("gpipe", "tera_pipe"):
        return [microbatches] * parts
    return [max(1, min(microbatches, ranks - k * ranks // parts)) for k in range(parts)]


def mirrored(entry: Schedule, ranks: int, parts: int) -> list[int]:
    """The rank of each part; the two ranks that both hold two mirrored parts share one number."""
    order = entry.make(Request(ranks, 2 * parts, parts // ranks))
    by_part = [sorted(order.rank_of[chain[k]] for chain in order.chains) for k in range(parts)]
    return [ranks_of[0] for ranks_of in by_part]


def _first_that_works(tries: Sequence[Callable[[], list[int]]]) -> list[int]:
    """The first result without a ValueError. Raises that of the last."""
    for attempt in tries[:-1]:
        with contextlib.suppress(ValueError):
            return attempt()
    return tries[-1]()


# --- choice of a schedule ------------------------------------------------------------------------------

NEARLY = 1.01


def chosen(ranks: int, microbatches: int, costs: Mapping[int, Costs]) -> tuple[str, str]:
    """(name in SCHEDULES, reason): simulate the candidates and take the shortest step; within 1 % the first in the
    table, which has simple ones first.

    costs: virtual stages per rank -> costs of their parts, such as {1: costs, 2: costs.divided(2)}. 1 is required; a
    missing number is not possible.
    """
    assert 1 in costs, "1f1b has one part per rank"
    runs = {
        name: simulate(entry.make(Request(ranks, microbatches, entry.virtual_stages)), costs[entry.virtual_stages])
        for name, entry in SCHEDULES.items()
        if entry.candidate and entry.virtual_stages in costs
    }
    limit = max(runs["1f1b"].memory)
    fit = {name: run for name, run in runs.items() if max(run.memory) <= limit * (1 + 1e-9)}
    best = min(run.makespan for run in fit.values())
    name = next(name for name, run in fit.items() if run.makespan <= best * NEARLY)
    return name, _reason(name, runs, list(fit))


def _reason(name: str, runs: Mapping[str, Timeline], fit: list[str]) -> str:
    """One sentence with the numbers of all candidates."""
    others = [f"{other} {runs[other].makespan:.4g}" for other in fit if other != name]
    text = f"{name} takes {runs[name].makespan:.4g} per step by simulation"
    if others:
        text += f", {', '.join(others)}"
        if any(runs[other].makespan < runs[name].makespan for other in fit):
            text += " (within 1 % the simpler schedule is taken)"
    large = [f"{other} {max(run.memory):.4g}" for other, run in runs.items() if other not in fit]
    if large:
        text += f"; excluded, more memory than 1f1b's {max(runs['1f1b'].memory):.4g}: {', '.join(large)}"
    return text


# --- splits that others chose --------------------------------------------------------------------------


def kept_cuts(
    main: Sequence[Node], weights: Callable[[Node], Iterable[str]], pipeline: PipelinePlan, mesh: Mesh
) -> tuple[str, ...]:
    """The split points of an earlier plan if every weight is then used only by ranks that hold it; else the coarsest
    others for which that is so.

    main: the main nodes of a graph, in order. weights: names of the parameters that a node reads.
    Raises ValueError if there are no such split points.
    """
    order, owners = layout(pipeline, mesh), owners_of(pipeline, mesh)
    ranks = [{order.rank_of[chain[k]] for chain in order.chains} for k in range(pipeline.parts)]
    parts = {name: {k for k, found in enumerate(ranks) if found <= {*held}} for name, held in owners.items()}
    anywhere = frozenset(range(pipeline.parts))
    allowed = {node: anywhere.intersection(*(parts.get(name, anywhere) for name in weights(node))) for node in main}
    with suppress(ValueError):
        part_of = parts_by_node(*resolve(main, pipeline.split_points))
        if all(part in allowed[node] for node, part in part_of.items()):
            return pipeline.split_points
    for level in LEVELS:
        units = units_at(main, level)
        found = _starts([anywhere.intersection(*(allowed[n] for n in unit.nodes)) for unit in units], pipeline.parts)
        if found:
            return tuple(units[i].name for i in found[1:])
    raise ValueError(_refusal(main, allowed, weights, owners))


def _starts(allowed: Sequence[Collection[int]], parts: int) -> list[int]:
    """The first unit of each part, as late as the others allow; [] if there is no way. ``allowed``: the parts that each
    unit may be in."""
    fits = [[False] * (parts + 1) for _ in range(len(allowed) + 1)]  # [i][k]: units from i on, where i is in part k
    fits[-1][parts - 1] = True
    for i in reversed(range(len(allowed))):
        for k in allowed[i]:
            fits[i][k] = fits[i + 1][k] or (i + 1 < len(allowed) and fits[i + 1][k + 1])
    if not fits[0][0]:
        return []
    starts = [0]
    for i in range(1, len(allowed)):
        if not fits[i][len(starts) - 1]:
            starts.append(i)
    return starts


def _refusal(
    main: Sequence[Node],
    allowed: Mapping[Node, Collection[int]],
    weights: Callable[[Node], Iterable[str]],
    owners: Mapping[str, Sequence[int]],
) -> str:
    part = 0
    for node in main:
        later = [k for k in allowed[node] if k >= part]
        if not later:
            held = " and ".join(f"{name} (rank {', '.join(map(str, owners[name]))})" for name in weights(node))
            return (
                f"pipeline: {described_at(node)} computes with {held}, which no stage at this point holds; the forward "
                "now uses weights in another order than when parallelize placed them on the axis pp: make such a "
                "change before parallelize"
            )
        part = min(later)
    return (
        "pipeline: the forward has fewer layers than when parallelize placed its weights, so a stage has no operation; "
        "make such a change before parallelize"
    )

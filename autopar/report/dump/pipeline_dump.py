"""The pipeline's part of a dump: what the ranks run as text, as a trace, and as a section of the report.

Without a measured step the times are estimates (`autopar.cost.flops`). With one, the simulation takes the median time
of every part's actions, so that it says what the schedule would come to if each action always took that long, and what
is drawn below it is what happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from autopar.cost.memory import memories
from autopar.cost.step_timeline import step_timeline
from autopar.cost.step_traffic import step_communication
from autopar.ir.layer_names import modules_of
from autopar.report.chrome_trace import Event, Span, events_of, measured_events, write_trace
from autopar.report.formatting import human_bytes
from autopar.report.html.page import Section, table
from autopar.report.html.pipeline_section import pipeline_section
from autopar.schedule.order import BACKWARD, COMPUTE, PARAMETERS, Action, Order
from autopar.schedule.request import Costs
from autopar.schedule.simulate import Timeline, per_part, simulate
from autopar.steps.graphs import Compiled
from autopar.steps.of_rank import parts_of

UNIT = 1e-3  # seconds per unit of the pictures' times
Recorded = Sequence[tuple[Action, float, float]]


def dump_pipeline(
    folder: Path, compiled: Compiled, recorded: Sequence[Recorded] = (), modules: Sequence[Sequence[Span]] = ()
) -> list[Section]:
    """Write order.txt and trace.json, and make the sections of the report.

    recorded: for every coordinate on pp, (action, start, end) in seconds of one clock, as an executor that was made
    with ``record=True`` has them in ``timeline``; () for none. modules: (path, start, end) by the same clock, as it has
    them in ``modules``.
    """
    measured = measured_events(recorded, UNIT) or None
    timeline = step_timeline(compiled, UNIT)
    if measured:
        timeline = simulate(timeline.order, measured_costs(timeline.order, measured, timeline.costs))
    (folder / "order.txt").write_text(timeline.order.text() + "\n", encoding="utf-8")
    runs: dict[str, Iterable[Event]] = {"simulated": events_of(timeline)}
    if measured:
        runs["measured"] = measured
    within = {"measured": [[(path, s / UNIT, e / UNIT) for path, s, e in of_rank] for of_rank in modules]}
    write_trace(folder / "trace.json", runs, UNIT, within)
    return [_section(compiled, timeline, measured)]


def measured_costs(order: Order, events: Iterable[Event], costs: Costs) -> Costs:
    """``costs`` with the median of what was measured for every part; where B and W ran in one, B is all of it.

    comm is the least time between the end of an action and the start of what took its result on another rank.
    """
    events = [e for e in events if e[1].kind in (*COMPUTE, *PARAMETERS)]
    taken: dict[tuple[int, str], list[float]] = {}
    for _, action, start, end in events:
        taken.setdefault((order.part_of(action.stage), action.kind), []).append((end - start) * _slices(action, order))

    def times(*kinds: str) -> tuple[float, ...]:
        found = [[taken.get((part, kind)) for kind in kinds] for part in range(order.parts)]
        return tuple(next((median(times) for times in of_part if times), 0.0) for of_part in found)

    gaps = [max(0.0, later[2] - one[3]) for one, later in _neighbours(events)]
    joined = [max(0.0, x - b) for x, b in zip(times("BWR"), times("BW", "BWR"), strict=True)]  # R inside of a backward
    return replace(
        costs, F=times("F"), B=times("B", "BW", "BWR"), W=times("W"), G=times("G"),
        R=tuple(map(max, times("R"), joined)), comm=min(gaps, default=0.0),
    )  # fmt: skip


def _slices(action: Action, order: Order) -> int:
    """Costs are those of a whole microbatch."""
    return order.slices if action.kind in COMPUTE else 1


def _neighbours(events: Sequence[Event]) -> list[tuple[Event, Event]]:
    """Pairs of actions that follow each other along a chain on two ranks."""
    ways: dict[tuple[bool, int, int], list[Event]] = {}
    for event in events:
        if event[1].kind in ("F", *BACKWARD):
            ways.setdefault((event[1].kind == "F", event[1].microbatch, event[1].slice), []).append(event)
    found = []
    for way in ways.values():
        way.sort(key=lambda e: e[2])
        found += [(one, later) for one, later in pairwise(way) if one[0] != later[0]]
    return found


# --- the report ----------------------------------------------------------------------------------------------


def _section(compiled: Compiled, timeline: Timeline, measured: Sequence[Event] | None) -> Section:
    estimated = f"estimated for {compiled.plan.options.target_hardware}"
    times = "simulated with the median times of the measured step" if measured else estimated
    notes = [f"Times are {times}; peak memory of activations in MiB."]
    notes += [reason for subject, reason in compiled.plan.notes if subject == "pipeline"]
    section = pipeline_section(in_mebibytes(timeline), measured, notes, "ms")
    parts = f"<p class=muted>Parts, for one microbatch</p>{_parts(compiled, timeline)}"
    ranks = f"<p class=muted>Ranks of pp, for a step</p>{_ranks(compiled, timeline)}"
    return replace(section, body=f"{section.body}\n{parts}\n{ranks}")


def in_mebibytes(timeline: Timeline) -> Timeline:
    """Memory as numbers that people read."""
    return replace(timeline, memory=tuple(value / 2**20 for value in timeline.memory))


def _parts(compiled: Compiled, timeline: Timeline) -> str:
    costs, order = timeline.costs, timeline.order
    names = [p.name for p in compiled.parameters]
    rows = []
    for k, part in enumerate(compiled.pipeline.parts):
        ranks = ", ".join(str(r) for r in sorted({order.rank_of[chain[k]] for chain in order.chains}))
        modules = modules_of(name for name in names if name in part.parameters)
        times = [f"{per_part(getattr(costs, kind), k):.4g}" for kind in "FBW"]
        rows.append([str(k), ranks, *times, human_bytes(per_part(costs.activations, k)), modules])
    head = ("part", "on pp", "F, ms", "B, ms", "W, ms", "activations", "modules")
    return table(head, rows, numeric=(2, 3, 4, 5))


def _ranks(compiled: Compiled, timeline: Timeline) -> str:
    rows = []
    for rank, found in enumerate(memories(compiled)):
        sent = sum(v.bytes for v in step_communication(compiled, rank).values())
        sizes = (found.saved, found.parameters, found.optimizer, found.gathered, found.peak, sent)
        parts = ", ".join(map(str, parts_of(timeline.order, rank)))
        busy = f"{timeline.busy[rank]:.4g}"
        rows.append([str(rank), parts, busy, str(timeline.live[rank]), *map(human_bytes, sizes)])
    head = ("pp", "parts", "busy, ms", "live", "activations", "parameters", "optimizer", "gathered", "peak", "sent")
    return table(head, rows, numeric=tuple(range(2, 10)))

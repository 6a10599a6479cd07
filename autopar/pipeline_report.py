"""What a schedule comes to: numbers of one, all schedules side by side, and the part of the report that shows one."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from autopar.flops import DEFAULT
from autopar.grid import grid
from autopar.picture import svg
from autopar.pipeline_runs import hop_bytes, lowered_order, slice_shares
from autopar.planner.pipeline import costs_of, kept
from autopar.report import Section, facts
from autopar.schedule import SCHEDULES, Costs, Order, Request
from autopar.steps import Compiled, Pipeline
from autopar.timeline import Timeline, simulate
from autopar.trace import Event

SECTION = "Pipeline"


def timeline_of(compiled: Compiled, unit: float = 1.0) -> Timeline:
    """The step of a compiled pipeline, as its ranks run it, on times estimated from its graphs, in units of ``unit``
    seconds; memory in bytes."""
    pipeline = compiled.pipeline
    assert pipeline is not None
    costs = costs_of(pipeline.parts, pipeline.hops, compiled.plan.mesh)
    if pipeline.order.slices > 1 and not costs.tokens:
        costs = _of_slices(costs, pipeline)
    return simulate(lowered_order(pipeline), in_units(costs, unit))


def _of_slices(costs: Costs, pipeline: Pipeline) -> Costs:
    """From the costs of the token slice that the graphs' shapes are for to those of a micro-batch of several: all grow
    with the tokens."""
    shares = slice_shares(pipeline)
    whole = sum(shares)
    changed: dict[str, Any] = {}
    for name in ("F", "B", "W", "stash"):
        value = getattr(costs, name)
        changed[name] = tuple(v * whole for v in value) if isinstance(value, tuple) else value * whole

    def received(part: int) -> int:
        return sum(hop_bytes(h, i) for h in pipeline.hops if h.target == part for i in range(len(shares)))

    changed["activations"] = tuple(kept(part) * whole + received(k) for k, part in enumerate(pipeline.parts))
    changed["comm"] = DEFAULT.latency + (costs.comm - DEFAULT.latency) / len(shares)  # a transfer is of one slice
    part = tuple(share / whole for share in shares)
    return replace(costs, **changed, scale=part, tokens=part)


def in_units(costs: Costs, unit: float) -> Costs:
    """Costs with their times in units of ``unit`` seconds."""
    changed: dict[str, Any] = {}
    for name in ("F", "B", "W", "comm", "FB", "G", "R"):
        value = getattr(costs, name)
        if value is not None:
            changed[name] = tuple(v / unit for v in value) if isinstance(value, tuple) else value / unit
    return replace(costs, **changed)


def summary(timeline: Timeline) -> dict[str, Any]:
    """Plain JSON values: makespan; bubble (idle share of a step: for equal stages 1 - m (F + B + W) / cost, Qi et al.
    2024); peak memory and order of each rank."""
    return {
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "peak": [round(value, 9) for value in timeline.memory],
        "order": [[str(action) for action in actions] for actions in timeline.order.ranks],
    }


def describe(timeline: Timeline, unit: str = "") -> list[tuple[str, str]]:
    """(what, value) for people."""
    unit = f" {unit}" if unit else ""
    rows = [("makespan", f"{timeline.makespan:,.6g}{unit}")]
    if timeline.cost < timeline.makespan * (1 - 1e-9):
        rows.append(("step (each rank from its own start)", f"{timeline.cost:,.6g}{unit}"))
    most = max(timeline.memory)
    rank = timeline.memory.index(most)
    return [*rows, ("bubble", f"{timeline.bubble:.2%}"), ("peak memory", f"{most:.4g} (rank {rank})")]


def pipeline_section(
    timeline: Timeline, measured: Iterable[Event] | None = None, notes: Sequence[str] = (), unit: str = ""
) -> Section:
    """A part of the report: numbers, picture, grid, and the actions as the executor reads them.

    measured: (rank, action, start, end) of a real run, in the timeline's unit. notes: a line each.
    """
    order, events = timeline.order, None if measured is None else list(measured)
    rows = [("schedule", order.name), ("ranks", str(len(order.ranks))), ("stages", str(len(order.rank_of)))]
    rows += [("micro-batches", str(order.micro_batches)), *describe(timeline, unit)]
    if events:
        took = max(e[3] for e in events) - min(e[2] for e in events)
        rows.append(("measured", f"{took:,.5g}{f' {unit}' if unit else ''}"))
    lines = "".join(f"<p class=muted>{html.escape(note)}</p>" for note in notes)
    grids = (("grid", grid(timeline, 160).plain), ("actions", order.text()))
    texts = "".join(
        f"<details class=inner><summary>{name}</summary><pre>{html.escape(text)}</pre></details>"
        for name, text in grids
    )
    picture = svg(timeline, title=order.name, measured=events, unit=unit)
    return Section(SECTION, f"{facts(rows)}{lines}\n{picture}<div class=level>{texts}</div>")


# --- schedules side by side ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One row of a comparison: a timeline, or why there is none."""

    name: str
    timeline: Timeline | None = None
    refusal: str = ""


def run(name: str, request: Request, costs: Costs) -> Timeline:
    """Make a schedule and simulate it.

    ``costs`` are of a rank's whole share of the model for one micro-batch (parts are equal shares of it), so schedules
    with more parts per rank compare. Raises ValueError for unknown names, and for what a schedule cannot do.
    """
    entry = SCHEDULES[name]
    assert isinstance(costs.activations, (int, float))
    each = costs.divided(max(request.chunks, 1))
    order = entry.make(replace(request, costs=each))
    assert order.parts == request.ranks * request.chunks, f"{name}: {order.parts} parts"
    timeline = simulate(order, each)
    if request.memory_limit is not None:
        _check_memory(timeline, request.memory_limit * costs.activations)
    return timeline


def _check_memory(timeline: Timeline, limit: float) -> None:
    most = max(timeline.memory)
    if most > limit * (1 + 1e-9):
        raise ValueError(
            f"schedule: {timeline.order.name} needs a memory limit of {most:.4g} (rank {timeline.memory.index(most)}), "
            f"found {limit:.4g}; take one that holds less, such as 1f1b, or seq1f1b with token slices"
        )


def compare(request: Request, costs: Costs, chunks: int | None = None) -> list[Outcome]:
    """Every schedule on the same work, with its own number of parts per rank unless ``chunks`` is given."""
    out = []
    for name, entry in SCHEDULES.items():
        try:
            asked = replace(request, chunks=chunks or entry.chunks)
            out.append(Outcome(name, run(name, asked, costs)))
        except ValueError as error:
            out.append(Outcome(name, refusal=" ".join(str(error).split())))
    return out


def sent(order: Order) -> int:
    """Activations that go from rank to rank in a step; as many gradients come back."""
    hops = [
        sum(order.rank_of[a] != order.rank_of[b] for a, b in pairwise(chain)) * order.chain_of.count(i)
        for i, chain in enumerate(order.chains)
    ]
    return sum(hops) * order.slices

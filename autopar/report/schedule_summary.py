"""Results of schedules: numbers of one, a comparison of all, and a grid of actions."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rich.text import Text

from autopar.report.chrome_trace import Event, events_of
from autopar.schedule.order import COMPUTE, Action, Order
from autopar.schedule.request import SCHEDULES, Costs, Request
from autopar.schedule.simulate import Timeline, simulate


def summary(timeline: Timeline) -> dict[str, Any]:
    """Plain JSON values: makespan; bubble (idle share of a step: for equal stages 1 - m (F + B + W) / cost, Qi et al.
    2024); peak memory and order of each rank."""
    return {
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "peak": [round(value, 9) for value in timeline.memory],
        "order": [[str(action) for action in actions] for actions in timeline.order.ranks],
    }


def timeline_facts(timeline: Timeline, unit: str = "") -> list[tuple[str, str]]:
    """(what, value) pairs to print."""
    unit = f" {unit}" if unit else ""
    rows = [("makespan", f"{timeline.makespan:,.6g}{unit}")]
    if timeline.cost < timeline.makespan * (1 - 1e-9):
        rows.append(("step (each rank from its own start)", f"{timeline.cost:,.6g}{unit}"))
    most = max(timeline.memory)
    rank = timeline.memory.index(most)
    return [*rows, ("bubble", f"{timeline.bubble:.2%}"), ("peak memory", f"{most:.4g} (rank {rank})")]


# --- schedules side by side ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One row of a comparison: a timeline, or the refusal."""

    name: str
    timeline: Timeline | None = None
    refusal: str = ""


def run_schedule(name: str, request: Request, costs: Costs) -> Timeline:
    """Make a schedule and simulate it.

    ``costs`` are of a rank's whole share of the model for one microbatch (its stages are equal shares of it), so that
    schedules with more stages per rank compare. Raises ValueError for unknown names, and for requests that a schedule
    does not support.
    """
    entry = SCHEDULES[name]
    assert isinstance(costs.activations, (int, float))
    each = costs.divided(max(request.virtual_stages, 1))
    order = entry.make(replace(request, costs=each))
    assert order.parts == request.ranks * request.virtual_stages, f"{name}: {order.parts} parts"
    timeline = simulate(order, each)
    if request.memory_limit is not None:
        _check_memory(timeline, request.memory_limit * costs.activations)
    return timeline


def _check_memory(timeline: Timeline, limit: float) -> None:
    most = max(timeline.memory)
    if most > limit * (1 + 1e-9):
        raise ValueError(
            f"schedule: {timeline.order.name} needs a memory limit of {most:.4g} (rank {timeline.memory.index(most)}), "
            f"found {limit:.4g}; use one that needs less, such as 1f1b, or seq1f1b with token slices"
        )


def compare(request: Request, costs: Costs, chunks: int | None = None) -> list[Outcome]:
    """Every schedule on the same work, with its own number of stages per rank unless ``chunks`` is given."""
    out = []
    for name, entry in SCHEDULES.items():
        try:
            asked = replace(request, virtual_stages=chunks or entry.virtual_stages)
            out.append(Outcome(name, run_schedule(name, asked, costs)))
        except ValueError as error:
            out.append(Outcome(name, refusal=" ".join(str(error).split())))
    return out


def sent(order: Order) -> int:
    """Activations that go from rank to rank in a step; as many gradients come back."""
    edges = [
        sum(order.rank_of[a] != order.rank_of[b] for a, b in pairwise(chain)) * order.chain_of.count(i)
        for i, chain in enumerate(order.chains)
    ]
    return sum(edges) * order.slices


MOST_BLOCKS = 8

# Ink and paper by kind, for the first and for later stages of a rank.
_INK = "#1c2330"
_PAPER = {
    "F": ("#7fb0f5", "#bcd5fa"),
    "B": ("#63c7a0", "#b3e4d1"),
    "W": ("#f3c65c", "#f9e4b2"),
    "BW": ("#e38fb4", "#f2cbdc"),
    "BWR": ("#cf6a99", "#e8b1ca"),
}


@dataclass(frozen=True)
class _Cell:
    """An action, or a cell, of a rank, from column ``first`` up to column ``last``."""

    first: int
    last: int
    label: str
    style: str


def grid(timeline: Timeline, width: int = 120) -> Text:
    """The grid, at most ``width`` columns wide; coloured by kind where it is printed on a terminal."""
    rows = _rows(timeline)
    names = [f"rank {rank}" for rank in range(len(rows))]
    margin = max(map(len, names)) + 2
    columns = max(width - margin, 20)
    scale = max(((len(label) + 1) / time for row in rows for _, time, label, _ in row), default=1.0)
    span = timeline.makespan
    if span * scale > MOST_BLOCKS * columns:
        return Text(sequence(timeline.order, width))
    if span * scale <= columns:  # a whole number of columns per unit of time looks even
        scale = max(scale, math.floor(columns / span)) if scale <= math.floor(columns / span) < 2 * scale else scale
    origin = min(start for start, _ in timeline.window)
    cells = [[_cell(origin, scale, *facts) for facts in row] for row in rows]
    total = max((cell.last for row in cells for cell in row), default=0)
    out = Text()
    # A block shows all of the cells that begin in it, so it leaves room for the widest one at its end.
    widest = max((cell.last - cell.first for row in cells for cell in row), default=0)
    step = columns if total <= columns else max(columns - widest, columns // 2)
    step = math.ceil(total / math.ceil(total / step)) if total else 1  # blocks of one length
    for first in range(0, total, step):
        last = min(first + step, total)
        out.append(("\n" if first else "") + " " * margin + _ruler(first, last, scale, span) + "\n", style="dim")
        for name, row in zip(names, cells):
            out.append(name.ljust(margin))
            _line(out, [cell for cell in row if cell.first < last and cell.last > first], first)
    return out


def sequence(order: Order, width: int = 120) -> str:
    """The actions of each rank in order, without times."""
    label = len(f"rank {len(order.ranks) - 1}") + 2
    lines = []
    for rank, actions in enumerate(order.ranks):
        text = " ".join(str(action) for action in actions).replace("& ", "&")
        lines += textwrap.wrap(
            text, max(width, 20), initial_indent=f"rank {rank}".ljust(label), subsequent_indent=" " * label
        )
    return "\n".join(lines) + "\n"


def _rows(timeline: Timeline) -> list[list[tuple[float, float, str, str]]]:
    """Per rank: (start, time, label, style) of each cell; two actions that run together are one cell."""
    several = any(len({a.stage for a in actions}) > 1 for actions in timeline.order.ranks)
    rows: list[list[list[Event]]] = [[] for _ in timeline.order.ranks]
    for event in events_of(timeline):
        row = rows[event[0]]
        if event[1].kind in COMPUTE:
            together = row and row[-1][0][1].paired and row[-1][0][2:] == event[2:]
            row[-1].append(event) if together else row.append([event])
    out = []
    for row in rows:
        stages = sorted({e[1].stage for cell in row for e in cell})
        styles = [_style(cell[0][1], stages) for cell in row]
        labels = ["&".join(_label(e[1], several) for e in cell) for cell in row]
        out.append([(c[0][2], c[0][3] - c[0][2], label, style) for c, label, style in zip(row, labels, styles)])
    return out


def _label(action: Action, several: bool) -> str:
    return str(action).rstrip("&") if several else str(action).removeprefix(str(action.stage)).rstrip("&")


def _style(action: Action, stages: Sequence[int]) -> str:
    return f"{_INK} on {_PAPER[action.kind][min(stages.index(action.stage), 1)]}"


def _cell(origin: float, scale: float, start: float, time: float, label: str, style: str) -> _Cell:
    first, last = (math.floor((t - origin) * scale + 0.5 + 1e-6) for t in (start, start + time))
    return _Cell(first, last, label, style)


def _line(out: Text, cells: Sequence[_Cell], first: int) -> None:
    at = first
    for cell in cells:
        out.append(" " * (cell.first - at))
        text = f"{cell.label:─<{cell.last - cell.first - 1}} "
        if cell.first < first:  # begun, and named, in the block before
            text = f"{'':─<{cell.last - first - 1}} "
        out.append(text, cell.style)
        at = cell.last
    out.rstrip()
    out.append("\n")


def _ruler(first: int, last: int, scale: float, span: float) -> str:
    """Times above the columns at which they are."""
    step = 10.0 ** math.floor(math.log10(8 / scale))
    step = next(step * f for f in (1, 2, 5, 10, 20) if step * f * scale >= 8)
    text = ""
    for i in range(math.floor(span / step) + 1):
        column = math.floor(i * step * scale + 0.5)
        if first <= column < last - len(f"{i * step:g}") + 1:
            text = text.ljust(column - first) + f"{i * step:g}"
    return text

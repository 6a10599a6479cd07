"""`autopar schedule`: simulate a pipeline schedule on given times; print it, its bubble and its memory.

    autopar schedule --name zb_h1 --stages 8 --microbatches 24 --times F=18.5,B=18.1,W=9.3,comm=0.6
    autopar schedule --name all --stages 8 --microbatches 24

The times are those of a rank's whole share of the model, so schedules with several parts per rank compare.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autopar.cli.command import Command, console_of_results
from autopar.report.chrome_trace import events_of, write_trace
from autopar.report.html.schedule_picture import svg
from autopar.report.schedule_summary import Outcome, compare, grid, run_schedule, sent, summary, timeline_facts
from autopar.report.tables import show_table
from autopar.schedule.request import SCHEDULES, Costs, Request
from autopar.schedule.simulate import Timeline

ALL = "all"
TIMES = ("F", "B", "W", "comm", "FB")
SIZES = ("M_B", "M_W")
MOST_CELLS = 1_000_000  # minutes of simulation
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_WIDTH = 160  # of the grid when stdout is no terminal


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--name", required=True, help=f"a schedule, or '{ALL}' for a table: {', '.join(SCHEDULES)}")
    add("--stages", type=int, required=True, metavar="N", help="ranks of the pp axis")
    add("--microbatches", type=int, required=True, metavar="N")
    add("--virtual-stages", type=int, metavar="N", help="stages per rank (default: that of the schedule)")
    add("--token-slices", type=int, default=1, metavar="N", help="token slices per microbatch (default: 1)")
    add(
        "--times",
        default="",
        metavar="F=18.5,B=18.1,W=9.3,comm=0.6",
        help="times of one microbatch on all stages of a rank: F forward, B backward to inputs, W backward to weights "
        "(a full backward takes B + W), comm a transfer, FB a cell of overlapped forward and backward (default: "
        "F=B=W=1, FB=F+B+W)",
    )
    add(
        "--memory",
        default="",
        metavar="M_B=1,M_W=0.5",
        help="memory of one microbatch on a rank: M_B from F until B, M_W from B until W (default: 1 and 0.5)",
    )
    add("--memory-limit", type=float, metavar="M", help="memory limit of a rank, in microbatches (units of M_B)")
    add("--unit", choices=UNITS, default="ms", help="unit of times in pictures and traces (default: %(default)s)")
    add("--json", action="store_true", help='print {"makespan", "bubble", "peak", "order"}, the last two per rank')
    add("--svg", type=Path, metavar="FILE", help="draw the schedule")
    add("--trace", type=Path, metavar="FILE", help="write a trace for chrome://tracing or ui.perfetto.dev")


def _run(args: argparse.Namespace) -> int:
    for name in ("stages", "microbatches", "token_slices"):
        if getattr(args, name) < 1:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option}: expected a positive whole number, found {getattr(args, name)}")
    if args.virtual_stages is not None and args.virtual_stages < 1:
        raise ValueError(f"--virtual-stages: expected a positive whole number, found {args.virtual_stages}")
    costs = asked_costs(args.times, args.memory)

    virtual_stages = args.virtual_stages or (1 if args.name == ALL else SCHEDULES[args.name].virtual_stages)
    cells = args.stages * args.microbatches * virtual_stages * args.token_slices
    if cells > MOST_CELLS:
        raise ValueError(
            f"--stages: a picture of stages x microbatches x virtual stages x token slices needs at most {MOST_CELLS} "
            f"cells, found {cells}; use fewer microbatches, as the pattern repeats"
        )
    request = Request(args.stages, args.microbatches, virtual_stages, args.token_slices, memory_limit=args.memory_limit)
    if args.name == ALL:
        return _all(args, request, costs)
    timeline = run_schedule(args.name, request, costs)
    unit = args.unit if args.times else ""
    facts = timeline_facts(timeline, unit)
    try:
        if args.svg:
            notes = " · ".join(f"{what} {value}" for what, value in facts)
            args.svg.write_text(svg(timeline, title=args.name, unit=unit, notes=notes), encoding="utf-8")
        if args.trace:
            write_trace(args.trace, {args.name: events_of(timeline)}, UNITS[args.unit])
    except OSError as error:
        raise ValueError(f"{error.filename}: cannot be written: {error.strerror}") from error
    if args.json:
        print(json.dumps(summary(timeline)))
    else:
        _print(timeline, facts)
    return 0


def asked_costs(times: str, memory: str) -> Costs:
    """Costs from the texts of --times and --memory. Raises ValueError."""
    found = _numbers("--times", times, TIMES, "F=18.5,B=18.1,W=9.3,comm=0.6")
    sizes = _numbers("--memory", memory, SIZES, "M_B=1,M_W=0.5")
    for name in ("F", "B", "W"):
        if found.get(name, 1.0) == 0:
            raise ValueError(f"--times: {name} needs a time above 0, found 0")
    named: dict[str, Any] = {**found, "activations": sizes.get("M_B", 1.0), "stash": sizes.get("M_W", 0.5)}
    return Costs(**named)


def _numbers(option: str, text: str, known: Sequence[str], example: str) -> dict[str, float]:
    """{"F": 18.5} of "F=18.5"."""
    found: dict[str, float] = {}
    for pair in text.split(",") if text else []:
        name, _, number = pair.strip().partition("=")
        if name not in known:
            raise ValueError(f"{option}: expected NAME=NUMBER of {', '.join(known)}, found {pair!r}; such as {example}")
        if name in found:
            raise ValueError(f"{option}: {name} is given twice")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise ValueError(f"{option}: {name} needs a number of 0 or more, found {number!r}; such as {example}")
        found[name] = value
    return found


def _console() -> Console:
    return console_of_results(_WIDTH)


def _print(timeline: Timeline, facts: Sequence[tuple[str, str]]) -> None:
    console = _console()
    console.print(grid(timeline, console.width), no_wrap=True, overflow="ignore", crop=False)
    for what, value in facts:
        console.print(f"{what}: {value}")
    peaks = ", ".join(f"{value:.4g}" for value in timeline.memory)
    console.print(f"peak memory per rank: {peaks}", soft_wrap=True)


# --- all of them ---------------------------------------------------------------------------------------------


def _all(args: argparse.Namespace, request: Request, costs: Costs) -> int:
    if args.svg or args.trace:
        raise ValueError(f"--svg and --trace need one schedule, found --name {ALL}")
    outcomes = compare(request, costs, args.virtual_stages)
    if args.json:
        rows = {o.name: summary(o.timeline) if o.timeline else {"refused": o.refusal} for o in outcomes}
        print(json.dumps(rows))
    else:
        show_table(_console(), schedules_table(outcomes))
    return 0


def schedules_table(outcomes: Sequence[Outcome]) -> Table:
    """A row per schedule: the fastest is bold; those that cannot run have a reason."""
    table = Table(title_justify="left")
    for column in ("schedule", "parts", "makespan", "step", "bubble", "peak memory", "sent", "copies"):
        table.add_column(column, justify="left" if column == "schedule" else "right", no_wrap=True)
    table.add_column("why not", overflow="fold")
    fastest = min((o.timeline.cost for o in outcomes if o.timeline), default=0.0)
    for outcome in outcomes:
        t, entry = outcome.timeline, SCHEDULES[outcome.name]
        if t is None:
            table.add_row(outcome.name, *[""] * 7, outcome.refusal.replace("[", "\\["), style="dim")
            continue
        facts = (f"{t.makespan:,.5g}", f"{t.cost:,.5g}", f"{t.bubble:.2%}", f"{max(t.memory):.4g}", str(sent(t.order)))
        bold = "bold" if t.cost <= fastest * (1 + 1e-9) else None
        table.add_row(outcome.name, str(t.order.parts), *facts, str(entry.copies), "", style=bold)
    return table


SCHEDULE = Command("schedule", "simulate and draw a pipeline schedule", _add_arguments, _run)

"""`autopar attention`: runs every algorithm on tensors without data, and compares their costs."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from autopar.attention.layouts import LAYOUTS
from autopar.attention.problem import Mask, Problem
from autopar.cli.command import console_of_results
from autopar.cost.attention_costs import PASSES, AttentionCost, candidates, pass_timeline, worth
from autopar.cost.attention_timeline import ideal_seconds
from autopar.cost.hardware import Device, device_named
from autopar.cost.topology import Topology
from autopar.planner.assumed_documents import lengths_in_row
from autopar.planner.attention_choice import (
    AUTO,
    AttentionChoice,
    check_layout,
    choose_algorithms,
    choose_layout,
    dealt,
)
from autopar.report.attention_picture import timeline_svg
from autopar.report.tables import escaped, human_digits, show_table, table_of

_WIDTH = 180  # of tables when stdout is no terminal


def compare_algorithms(args: argparse.Namespace) -> int:
    """Run it. Returns the exit code; raises ValueError for bad input."""
    problem, device = asked_problem(args), device_named(args.target_hardware)
    links = Topology("switch", args.bandwidth or device.card.bandwidth, _given(args.latency, device.card.latency))
    topology = Topology.parse(args.topology, links)
    console = console_of_results(_WIDTH)
    with Console(stderr=True).status("running the algorithms without data"):
        layout, why = choose_layout([problem], args.attention, args.cp_load_balance, topology, device)
        choice = choose_algorithms(_as_dealt(problem, layout), args.attention, topology, device)
        layouts = _layouts(problem) if args.cp_load_balance == AUTO else [layout]
        rows = {name: candidates(_as_dealt(problem, name), topology, device) for name in layouts}
        if args.svg:
            _draw(args.svg, _as_dealt(problem, layout), layout, topology, device)
    _print(console, problem, topology, device, rows, (layout, why), choice)
    return 0


def asked_problem(args: argparse.Namespace) -> Problem:
    """The attention that the arguments describe. Raises ValueError."""
    kv_heads, keys = args.kv_heads or args.heads, args.kv_seq or args.seq
    if args.heads % kv_heads:
        raise ValueError(f"--kv-heads: {args.heads} query heads are not a multiple of {kv_heads} key heads")
    causal = args.causal or not (args.full or args.kv_seq)
    if causal and keys != args.seq:
        raise ValueError(f"--causal: needs as many keys as queries, found {keys} and {args.seq}; use --full")
    if args.documents and keys != args.seq:
        raise ValueError(
            f"--documents: are of one sequence, found {args.seq} queries and {keys} keys; leave out --kv-seq"
        )
    for name, tokens in (("--seq", args.seq), ("--kv-seq", keys)):
        if tokens % args.ranks:
            nearest = -(-tokens // args.ranks) * args.ranks
            raise ValueError(f"{name}: {tokens} tokens do not divide over {args.ranks} ranks; use {nearest}")
    return Problem(
        batch=args.batch, heads=args.heads, kv_heads=kv_heads, queries=args.seq, keys=keys,
        width=args.head_dim, value_width=args.head_dim, dtype=getattr(torch, args.dtype), size=args.ranks,
        mask=Mask(causal, args.window), segments=bool(args.documents),
        documents=lengths_in_row(args.documents, keys),
    )  # fmt: skip


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _layouts(problem: Problem) -> list[str]:
    """The layouts to compare."""
    able = []
    for name in LAYOUTS if problem.mask.causal else ["contiguous"]:
        with suppress(ValueError):
            check_layout(problem, name)
            able.append(name)
    return able


def _as_dealt(problem: Problem, layout: str) -> Problem:
    if problem.queries == problem.keys:
        return dealt(problem, layout)
    return dataclasses.replace(problem, query_blocks=LAYOUTS[layout])


def _draw(file: Path, problem: Problem, layout: str, topology: Topology, device: Device) -> None:
    """One panel for each pass of each algorithm that can run it."""
    able = [algorithm for algorithm in worth(problem) if not algorithm.refusal(problem)]
    panels = {
        f"{algorithm.name}, {way}": pass_timeline(algorithm, problem, way, topology, device)
        for algorithm in able
        for way in PASSES
    }
    title = f"{problem.queries} queries, {problem.keys} keys over {problem.size} ranks"
    try:
        file.write_text(timeline_svg(panels, title, f"{layout} · {topology} · {device.name}"), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{file}: cannot be written: {error.strerror}") from error


# --- printing --------------------------------------------------------------------------------------------


def _print(
    console: Console,
    problem: Problem,
    topology: Topology,
    device: Device,
    rows: dict[str, list[AttentionCost]],
    layout: tuple[str, str],
    choice: AttentionChoice,
) -> None:
    kind = "causal" if problem.mask.causal else "full"
    window = f", window {problem.mask.window}" if problem.mask.window else ""
    console.print(
        f"attention of {problem.queries} queries to {problem.keys} keys ({kind}{window}), {problem.heads} heads, "
        f"{problem.kv_heads} key heads, over {problem.size} ranks; {topology}; {device.name}",
        soft_wrap=True,
    )
    show_table(console, algorithms_table(rows, (layout[0], choice)))
    ideals = [f"{way} {_ms(ideal_seconds(problem, way == 'backward', device))} ms" for way in PASSES]
    console.print(f"ideal: {', '.join(ideals)} (allowed pairs split evenly, at full speed, nothing exposed)")
    both = choice.forward if choice.forward == choice.backward else f"{choice.forward}+{choice.backward}"
    console.print(f"choice: {both} ({choice.reason})", soft_wrap=True)
    console.print(f"cp_load_balance: {layout[0]} ({layout[1]})", soft_wrap=True)


def algorithms_table(rows: dict[str, list[AttentionCost]], chosen: tuple[str, AttentionChoice]) -> Table:
    """A row per layout, algorithm and pass; what was chosen is bold, what is refused says why."""
    numbers = ("steps", "time, ms", "exposed, ms")
    table = table_of("", "layout", "algorithm", "pass", "bytes per rank", *numbers, "why not", right=numbers)
    for column in table.columns[:3]:
        column.no_wrap = True
    layout, choice = chosen
    picked = {"forward": choice.forward, "backward": choice.backward}
    for name, found in rows.items():
        for candidate in found:
            table.add_row(
                *_cells(name, candidate),
                style="dim"
                if candidate.refusal
                else "bold"
                if name == layout and picked[candidate.direction] == candidate.algorithm
                else None,
            )
        table.add_section()
    return table


def _cells(layout: str, candidate: AttentionCost) -> Sequence[str]:
    if candidate.refusal:
        return (layout, candidate.algorithm, candidate.direction, "", "", "", "", escaped(candidate.refusal))
    sent = ", ".join(f"{way} {_size(size)}" for way, size in candidate.sent)
    times = (_ms(candidate.seconds), _ms(candidate.exposed))
    return (layout, candidate.algorithm, candidate.direction, sent, str(candidate.steps), *times, "")


def _ms(seconds: float) -> str:
    return human_digits(seconds * 1e3)


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} GB"

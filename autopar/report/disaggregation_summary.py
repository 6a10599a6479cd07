"""Deployments of a mixture of experts, side by side, and the timeline of the first layers as text.

attention  111222333111222333      digits: microbatches; a point: the GPUs wait
experts    ....111222333111222
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from autopar.cost.ping_pong import Interval, simulated
from autopar.planner.experts.disaggregation import APART, Deployment
from autopar.report.tables import human_count, human_digits, human_seconds, show_table, table_of

HEAD = (
    "attention and experts", "on", "GPUs", "tp", "nodes", "tokens", "rows of an expert", "Ta", "Te", "Tc", "step",
    "tokens/s", "per GPU",
)  # fmt: skip
_COLUMNS = 96  # of a timeline
_DRAWN = 3  # layers
_SAME = 0.02  # shares of a difference that estimates do not show


def show_deployments(
    notes: Sequence[str], layers: int, apart: Deployment, together: Sequence[Deployment | str], console: Console
) -> None:
    """Print them. ``together``: colocated ones, or why there is none."""
    found = [x for x in together if isinstance(x, Deployment)]
    for line in notes:
        console.print(line, soft_wrap=True, markup=False)
    show_table(console, _table([apart, *found]))
    for refusal in (x for x in together if isinstance(x, str)):
        console.print(f"nothing {refusal}", soft_wrap=True, markup=False)
    console.print(verdict(apart, found), soft_wrap=True, markup=False)
    for line in timeline(apart, layers):
        console.print(line, soft_wrap=True, markup=False)


def _table(deployments: Sequence[Deployment]) -> Table:
    priced = any(any(x.price) for x in deployments)
    columns = (*HEAD, *(["price per hour", "per unit of price"] if priced else []))
    table = table_of("", *columns, right=columns[2:])
    best = max(map(_value, deployments))
    for x in deployments:
        price = _of_roles(x, [human_digits(p) for p in x.price])
        cells = [*_cells(x), *([price, human_count(x.per_price)] if priced else [])]
        table.add_row(*cells, style="bold" if _value(x) == best else None)
    return table


def _cells(x: Deployment) -> list[str]:
    gpus, tp = (_of_roles(x, pair) for pair in (x.gpus, x.tp))
    times = map(human_seconds, (*x.times, x.seconds))
    batch = f"{x.microbatches} x {x.tokens}"
    rates = map(human_digits, (x.tokens_per_second, x.per_gpu))
    return [x.kind, _chips(x), gpus, tp, str(x.nodes), batch, human_digits(x.rows), *times, *rates]


def _of_roles(x: Deployment, pair: Sequence[object]) -> str:
    return f"{pair[0]} + {pair[1]}" if x.kind == APART else str(pair[0])


def _chips(x: Deployment) -> str:
    return " + ".join(dict.fromkeys(x.chips))


def _value(x: Deployment) -> float:
    return x.per_price or x.per_gpu


def verdict(apart: Deployment, together: Sequence[Deployment]) -> str:
    """Whether GPUs of their own pay, and by how much, against each colocated deployment."""
    unit = "unit of price" if any(apart.price) else "GPU"
    if not together:
        return "disaggregation pays: nothing else keeps the limit and fits in memory"
    ratios = [_value(apart) / _value(x) for x in together]
    said = "; ".join(f"{ratio:.2f} of {x.kind} on {x.chips[0]}" for ratio, x in zip(ratios, together, strict=True))
    least = min(ratios)
    found = "pays" if least > 1 + _SAME else "does not pay" if least < 1 - _SAME else "makes no difference"
    warning = ""
    if len(set(apart.chips)) > 1 and not any(apart.price):
        warning = "; chips differ, so pass what they cost by --price"
    return f"disaggregation {found}: tokens per {unit} are {said}{warning}"


def timeline(apart: Deployment, layers: int) -> list[str]:
    """The first layers of a step."""
    shown = min(layers, _DRAWN)
    events = simulated(apart.times, shown, apart.microbatches)
    end = max(x.end for x in events) + apart.times.exchange
    head = f"the first {shown} of {layers} layers" if shown < layers else "a step"
    return drawn(events, head, end)


def drawn(events: Sequence[Interval], head: str = "a step", end: float = 0.0) -> list[str]:
    """A timeline of what the ranks of both roles computed, simulated or measured (`Server.timeline`). ``end``: seconds,
    if it is behind the last event."""
    begin = min(x.start for x in events)
    length = max(end, *(x.end for x in events)) - begin
    rows = {role: ["."] * _COLUMNS for role in ("attention", "experts")}
    for x in reversed(events):
        first, behind = (round((t - begin) / length * _COLUMNS) for t in (x.start, x.end))
        rows[x.role][first:behind] = str((x.microbatch + 1) % 10) * (behind - first)
    return [
        f"{head}, {human_seconds(length)} (digits: microbatches; a point: the GPUs wait)",
        *(f"{role:10} {''.join(row)}" for role, row in rows.items()),
    ]

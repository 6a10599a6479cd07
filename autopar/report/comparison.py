"""Plans of one model on several meshes, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from autopar.report.formatting import human_bytes, human_count, human_seconds
from autopar.report.tables import escaped, fits, show_table, table_of

_NUMBERS = ("ranks", "a step", "tokens/s", "MFU", "exposed", "bubble", "memory", "of it weights", "optimizer", "sent")


def show_side_by_side(summaries: Sequence[Mapping[str, Any]], examples: int, tokens: int, console: Console) -> None:
    """Print a row per mesh, the fastest marked. summaries: of `autopar.report.summary.summarize`, each with its "mesh";
    one with "refused" instead says why there is none. examples, tokens: of the whole batch, of an example."""
    title = f"{summaries[0]['model']}: {examples} examples of {tokens} tokens in a step, on each mesh"
    rows = {_mesh(s): _numbers(s, examples * tokens) for s in summaries if "refused" not in s}
    seconds = {_mesh(s): s["step"]["seconds"] for s in summaries if "refused" not in s}
    fastest = min(seconds, key=seconds.__getitem__, default="")
    table = table_of(title, "", "mesh", *_NUMBERS, right=_NUMBERS)
    for mesh, numbers in rows.items():
        table.add_row("fastest" if mesh == fastest else "", mesh, *numbers)
    if not fits(console, table):  # a column for each mesh
        table = table_of(title, "", *rows, right=tuple(rows))
        table.add_row("", *("fastest" if mesh == fastest else "" for mesh in rows))
        for i, name in enumerate(_NUMBERS):
            table.add_row(name, *(numbers[i] for numbers in rows.values()))
    if rows:
        show_table(console, table)
    for summary in summaries:
        if "refused" in summary:
            console.print(f"{_mesh(summary)}: {escaped(summary['refused'])}")


def _mesh(summary: Mapping[str, Any]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in summary["mesh"].items())


def _numbers(summary: Mapping[str, Any], tokens: int) -> list[str]:
    step, memory = summary["step"], summary["memory"]
    sent = sum(row["bytes"] for row in summary["communication"])
    bubble = f"{summary['pipeline']['bubble']:.1%}" if "pipeline" in summary else ""
    return [
        str(summary["ranks"]),
        human_seconds(step["seconds"]),
        human_count(tokens / step["seconds"]),
        f"{step['utilization']:.1%}",
        human_seconds(step["exposed"]),
        bubble,
        human_bytes(memory["peak"]),
        human_bytes(memory["parameters"]),
        human_bytes(memory["optimizer"]),
        human_bytes(sent),
    ]

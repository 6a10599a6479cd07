"""A timeline as text: what docstrings of schedules draw."""

from __future__ import annotations

from autopar.schedule.order import COMPUTE
from autopar.schedule.simulate import Timeline


def drawn(timeline: Timeline, step: float = 1.0) -> str:
    """A line per rank, a column per ``step`` of time; ``--`` where nothing starts and nothing runs, ``..`` where an
    action of an earlier column goes on."""
    columns = round(max(last for _, last in timeline.window) / step)
    rows = [_row(timeline, rank, step, columns) for rank in range(len(timeline.start))]
    width = max(len(word) for row in rows for word in row)
    label = len(str(len(rows) - 1))
    return "\n".join(
        f"rank {rank:<{label}}  " + " ".join(word.ljust(width) for word in row).rstrip()
        for rank, row in enumerate(rows)
    )


def _row(timeline: Timeline, rank: int, step: float, columns: int) -> list[str]:
    row = ["--"] * columns
    for action, start, end in zip(timeline.order.ranks[rank], timeline.start[rank], timeline.end[rank]):
        first, last = round(start / step), round(end / step)
        if action.kind not in COMPUTE or first >= last:
            continue
        row[first] = row[first] + str(action) if row[first].endswith("&") else str(action)
        row[first + 1 : last] = [".."] * (last - first - 1)
    return row

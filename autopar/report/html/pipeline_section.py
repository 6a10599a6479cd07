"""The section of the report that shows a schedule: numbers, picture, grid, actions."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from autopar.report.chrome_trace import Event
from autopar.report.html.page import Section, facts
from autopar.report.html.schedule_picture import svg
from autopar.report.schedule_grid import grid
from autopar.report.schedule_summary import timeline_facts
from autopar.schedule.simulate import Timeline

SECTION = "Pipeline"


def pipeline_section(
    timeline: Timeline, measured: Iterable[Event] | None = None, notes: Sequence[str] = (), unit: str = ""
) -> Section:
    """A part of the report: numbers, picture, grid, and the actions as the executor reads them.

    measured: (rank, action, start, end) of a real run, in the timeline's unit. notes: a line each.
    """
    order, events = timeline.order, None if measured is None else list(measured)
    rows = [("schedule", order.name), ("ranks", str(len(order.ranks))), ("stages", str(len(order.rank_of)))]
    rows += [("microbatches", str(order.microbatches)), *timeline_facts(timeline, unit)]
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

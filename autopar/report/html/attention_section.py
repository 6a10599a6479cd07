"""The section of the report about attention over sharded sequences: algorithms, reasons, candidates, timelines."""

from __future__ import annotations

import html
from collections.abc import Sequence

from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.program import WHOLE, trace
from autopar.cost.attention_costs import AttentionCost, pass_timeline
from autopar.cost.attention_timeline import AttentionTimeline, play
from autopar.planner.context_parallel import AXIS
from autopar.report.attention_picture import MOST_RANKS, timeline_svg
from autopar.report.attention_summary import Attention, attentions_of, cells_of, plain_cost
from autopar.report.html.page import Section, table
from autopar.steps.graphs import Compiled

SECTION = f"Attention over {AXIS}"


def attention_sections(compiled: Compiled) -> list[Section]:
    """The section of the report, if attention runs over cp: what runs, and for each attention the reason, the
    candidates and the timelines."""
    found = attentions_of(compiled)
    if not found:
        return []
    notes = [
        f"Links: {found[0].topology}. Times are estimated for {found[0].device.name}; bytes are those of one call, of "
        "the rank that sends most by each way.",
        *(f"{s.node}: {s.reason}" for s in compiled.plan.streams if s.axis == AXIS),
    ]
    body = "".join(map(_muted, notes)) + _overview(found)
    return [Section(SECTION, "\n".join([body, *map(_details, found)]))]


def _muted(line: str) -> str:
    return f"<p class=muted>{html.escape(line)}</p>\n"


def _overview(found: Sequence[Attention]) -> str:
    head = ("attention", "count", "layout", "pass", "algorithm", "bytes", "steps", "time", "exposed", "why")
    rows = [
        [a.modules, str(len(a.where)), a.layout, *cells_of(plain_cost(c)), a.plan.reason]
        for a in found
        for c in a.chosen
    ]
    return table(head, rows, numeric=(1, 6, 7, 8))


def _details(a: Attention) -> str:
    """The candidates of an attention, and its timelines."""
    rows = [_candidate_row(c, c in a.chosen) for c in a.candidates]
    head = ("algorithm", "pass", "bytes", "steps", "time", "exposed", "")
    looked_at = (
        f"<details open><summary>{len(rows)} candidates of {html.escape(a.modules)}</summary>"
        f"{table(head, rows, numeric=(3, 4, 5))}</details>"
    )
    panels = {f"{getattr(a.plan, way)}, {way}": _timeline(a, way) for way in a.passes}
    alone = f"; the first {MOST_RANKS}, each simulated alone" if a.problem.size > WHOLE else ""
    return looked_at + "\n" + timeline_svg(panels, a.modules, f"{a.what}{alone}; {a.layout}; {a.topology}")


def _candidate_row(c: AttentionCost, chosen: bool) -> list[str]:
    if c.refusal:
        return [c.algorithm, c.direction, "", "", "", "", c.refusal]
    way, algorithm, *cells = cells_of(plain_cost(c))
    return [algorithm, way, *cells, "chosen" if chosen else ""]


def _timeline(a: Attention, way: str) -> AttentionTimeline:
    """All ranks, up to the number that is simulated together. Above it, only the ranks that are drawn, because the cost
    of simulating all grows with the square."""
    algorithm = ALGORITHMS[getattr(a.plan, way)]
    if a.problem.size <= WHOLE:
        return pass_timeline(algorithm, a.problem, way, a.topology, a.device)
    programs = [trace(algorithm, a.problem, way == "backward", rank) for rank in range(MOST_RANKS)]
    return play(a.problem, way == "backward", programs, a.topology, a.device)

"""One self-contained HTML page that shows a compilation: plan, passes, every graph with its diff, communication.

It takes plain data, so it knows nothing of graphs, and needs nothing from the network. What others want to show (a
schedule's timeline, a memory curve) goes into ``Page.sections`` as HTML.
"""

from __future__ import annotations

import html
import importlib.resources
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.report.html.page_levels import Level, graph_levels

Row = Sequence[str]


@dataclass(frozen=True)
class Section:
    """A further part of the page; ``body`` is HTML."""

    title: str
    body: str


@dataclass
class Page:
    """Everything on the page. Rows are texts and are escaped; ``summary`` holds (what, value) pairs, ``plan``
    (decision, placement, reason), ``communication`` (graph, axis, kind, calls, bytes), ``timings`` (name, seconds).
    ``model``: sections that come first, before the plan."""

    title: str = "autopar"
    summary: list[tuple[str, str]] = field(default_factory=list)
    model: list[Section] = field(default_factory=list)
    plan: list[tuple[str, str, str]] = field(default_factory=list)
    timings: list[tuple[str, float]] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    communication: list[tuple[str, str, str, str, str]] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)


def render(report: Page) -> str:
    """The page as one HTML text."""
    parts = [
        Section("Summary", facts(report.summary)) if report.summary else None,
        *report.model,
        Section("Plan", _plan(report.plan)) if report.plan else None,
        *report.sections,
        Section("Communication", _communication(report.communication)),
        Section("Passes", _timings(report.timings)) if report.timings else None,
        Section("Graphs", graph_levels(report.levels)) if report.levels else None,
    ]
    shown = [part for part in parts if part]
    links = "".join(f'<a href="#{_anchor(s.title)}">{html.escape(s.title)}</a>' for s in shown)
    body = "\n".join(
        f'<section id="{_anchor(s.title)}"><h2>{html.escape(s.title)}</h2>\n{s.body}\n</section>' for s in shown
    )
    template = importlib.resources.files("autopar.report.html").joinpath("page.html").read_text(encoding="utf-8")
    fields = {"title": html.escape(report.title), "links": links, "body": body}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], template)


def table(head: Row, rows: Iterable[Row], numeric: Sequence[int] = ()) -> str:
    """An HTML table of texts; the columns ``numeric`` are right-aligned."""

    def cells(row: Row, tag: str) -> str:
        return "".join(
            f"<{tag}{' class=num' if i in numeric else ''}>{html.escape(text)}</{tag}>" for i, text in enumerate(row)
        )

    body = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return (
        f"<div class=scroll><table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
    )


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Cards of (what, value) pairs."""
    cards = (f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in rows)
    return f"<dl>{''.join(cards)}</dl>"


PLACEMENTS = (
    ("S(d)", "a rank stores a piece, cut along dim d"),
    ("I", "whole: every rank of the axis has the same"),
    ("used R", "a rank computes with the whole; its gradient is summed over the axis"),
    ("used S(d)", "a rank computes with its piece alone"),
)


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """What words, signs and colours stand for."""
    cells = "".join(f"<div><dt>{html.escape(word)}</dt><dd>{html.escape(text)}</dd></div>" for word, text in entries)
    return f"<dl class=legend>{cells}</dl>"


def findings(rows: Iterable[tuple[str, str]]) -> str:
    """(what was found, what to try), below each other."""
    lines = (f"<div><dt>{html.escape(found)}</dt><dd>{html.escape(words)}</dd></div>" for found, words in rows)
    return f"<dl class=findings>{''.join(lines)}</dl>"


def _plan(rows: Sequence[tuple[str, str, str]]) -> str:
    return legend(PLACEMENTS) + (
        f"<details{' open' if len(rows) <= 24 else ''}><summary>{len(rows)} decisions</summary>"
        f"{table(('what', 'placement', 'why'), rows)}</details>"
    )


def _communication(rows: Sequence[tuple[str, str, str, str, str]]) -> str:
    if not rows:
        return "<p class=muted>No graph communicates.</p>"
    hint = "<p class=muted>Bytes that each rank sends, ring algorithms.</p>"
    return hint + table(("graph", "axis", "kind", "calls", "bytes per rank"), rows, numeric=(3, 4))


def _timings(rows: Sequence[tuple[str, float]]) -> str:
    longest = max((seconds for _, seconds in rows), default=0.0) or 1.0
    shown = [row for row in rows if row[1] >= 0.01 * longest]
    if len(shown) < len(rows):
        shown.append((f"{len(rows) - len(shown)} short ones", sum(s for _, s in rows) - sum(s for _, s in shown)))
    lines = "".join(_bar(name, seconds, 100 * seconds / longest) for name, seconds in shown)
    return f"<div class=bars>{lines}</div><p class=muted>{sum(s for _, s in rows):.2f} s in total</p>"


def _bar(name: str, seconds: float, percent: float) -> str:
    fill = f"<i><b style='width:{max(percent, 0.3):.1f}%'></b></i>"
    return f"<div class=bar><span>{html.escape(name)}</span>{fill}<span class=num>{seconds * 1e3:,.1f} ms</span></div>"

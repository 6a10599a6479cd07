"""One self-contained HTML page that shows a compilation: plan, passes, every graph with its diff, communication.

It takes plain data, so it knows nothing of graphs, and needs nothing from the network. Further content (a schedule's
timeline, a memory curve) goes into ``Page.sections`` as HTML.
"""

from __future__ import annotations

import html
import importlib.resources
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

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


def facts(rows: Iterable[tuple[str, str]], kind: str = "") -> str:
    """(what, value) pairs as cards. kind: "legend" of words and colours, or "findings", below each other."""
    cards = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in rows)
    return f"<dl class={kind}>{cards}</dl>" if kind else f"<dl>{cards}</dl>"


PLACEMENTS = (
    ("S(d)", "sharded on dim d: a rank stores one shard"),
    ("I", "replicated: every rank of the axis has the same"),
    ("used R", "a rank computes with the unsharded value; the gradient is summed over the axis"),
    ("used S(d)", "a rank computes with its shard alone"),
)


def _plan(rows: Sequence[tuple[str, str, str]]) -> str:
    return facts(PLACEMENTS, "legend") + (
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


# --- graphs --------------------------------------------------------------------------------------------

MOST_DIFF, MOST_GRAPH = 12_000, 24_000  # characters of one
ROOM = 450_000  # characters of all


@dataclass(frozen=True)
class Level:
    """One graph: its text, the diff to the graph before, and how long the pass that made it took (0: unknown). file:
    next to the page, with the full text. same: equal to the graph before."""

    name: str
    text: str
    diff: str = ""
    seconds: float = 0.0
    nodes: int = 0
    file: str = ""
    same: bool = False


def graph_levels(levels: Sequence[Level]) -> str:
    """HTML of all levels in order."""
    shown = _shown(levels)
    idle = [level.name for level in levels if level.same]
    rows = [_level(i, level, *shown[i]) for i, level in enumerate(levels) if not level.same]
    if idle:
        few = "1 pass changes" if len(idle) == 1 else f"{len(idle)} passes change"
        rows.append(f"<p class=muted>{few} nothing: {html.escape(', '.join(idle))}</p>")
    return "\n".join(rows)


def _shown(levels: Sequence[Level]) -> list[tuple[str, str]]:
    """(diff, graph) of each level, as far as there is room: diffs first, then graphs."""
    room, texts = ROOM, [["", ""] for _ in levels]
    first = [(i, 0, level.diff, MOST_DIFF) for i, level in enumerate(levels) if level.diff]
    first += [(i, 1, level.text, MOST_GRAPH) for i, level in enumerate(levels) if not level.diff and not level.same]
    later = [(i, 1, level.text, MOST_GRAPH) for i, level in enumerate(levels) if level.diff]
    for i, place, text, most in (*first, *later):
        short = folded(text, most)
        if len(short) <= room:
            texts[i][place] = short
            room -= len(short)
    return [(diff, graph) for diff, graph in texts]


def _level(number: int, level: Level, diff: str, graph: str) -> str:
    changed = [line for line in level.diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    added = sum(line.startswith("+") for line in changed)
    numbers = [f"{level.nodes:,} nodes"] if level.nodes else []
    numbers += [f"<ins>+{added:,}</ins> <del>−{len(changed) - added:,}</del>"] if changed else []
    numbers += [f"{level.seconds * 1e3:,.1f} ms"] if level.seconds else []
    name = f"<b>{number:02d}</b> {html.escape(level.name)}<span class=muted>{' · '.join(numbers)}</span>"
    whole = f"<p class=muted>full text: <a href='{html.escape(level.file)}'>{html.escape(level.file)}</a></p>"
    whole = whole if level.file else ""
    tabs = f"<details class=inner open><summary>diff</summary><pre>{_diff_lines(diff)}</pre></details>" if diff else ""
    tabs += f"<details class=inner><summary>graph</summary><pre>{_graph_lines(graph)}</pre></details>" if graph else ""
    if not tabs and not whole:
        return f'<div class="level leaf" id="level-{number}">{name}</div>'
    return f'<details class=level id="level-{number}"><summary>{name}</summary>{tabs}{whole}</details>'


def _diff_lines(text: str) -> str:
    kinds = {"+": "ins", "-": "del", "@": "em"}
    out = []
    for line in text.splitlines():
        if line.startswith(("--- ", "+++ ")):
            continue
        tag = kinds.get(line[:1], "")
        out.append(f"<{tag}>{html.escape(line)}</{tag}>" if tag else html.escape(line))
    return "\n".join(out)


def _graph_lines(text: str) -> str:
    return "\n".join(_graph_line(line) for line in text.splitlines())


def _graph_line(line: str) -> str:
    """The name before the colon is bold, the comment is muted."""
    code, mark, note = line.partition("  # ")
    name, colon, rest = code.partition(": ")
    if colon and re.fullmatch(r"\w+", name):
        code = f"<b>{html.escape(name)}</b>: {html.escape(rest)}"
    else:
        code = html.escape(code)
    return f"{code}<i>{html.escape(mark + note)}</i>" if mark else code


# --- text that folds away ------------------------------------------------------------------------------

# The layer of a line: in the module's path behind the last comment, or in the name of a parameter's placeholder.
_PATH = re.compile(r"(?:^|[\s;])([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\.(\d+)(?=\.|$)")
_NAME = re.compile(r"^[-+ ]?((?:[a-z]\w*?)_)(\d+)_\w+: .*= (?:input|parameter|buffer)\b")


def folded(text: str, most: int) -> str:
    """The text without the lines of further layers, cut off after ``most`` characters; it says what is left out."""
    lines = text.splitlines()
    layers = [_layer(line) for line in lines]
    first: dict[str, int] = {}
    for layer in filter(None, layers):
        first[layer[0]] = min(first.get(layer[0], layer[1]), layer[1])
    kept = [layer is None or layer[1] == first[layer[0]] for layer in layers]
    short = list(_joined(lines, kept))
    return "\n".join(_without_empty_hunks(_cut(short, most)))


def _layer(line: str) -> tuple[str, int] | None:
    """(what is repeated, number)"""
    _, mark, note = line.rpartition("  # ")
    found = _PATH.search(note) if mark else _NAME.match(line)
    return (found[1], int(found[2])) if found else None


def _joined(lines: Iterable[str], kept: Iterable[bool]) -> Iterator[str]:
    left = 0
    for line, keep in zip(lines, kept, strict=True):
        if not keep:
            left += 1
            continue
        if left:
            yield f"... {left:,} lines of layers like these"
        left = 0
        yield line
    if left:
        yield f"... {left:,} lines of layers like these"


def _cut(lines: list[str], most: int) -> list[str]:
    room = most
    for i, line in enumerate(lines):
        room -= len(line) + 1
        if room < 0:
            return [*lines[:i], f"... {len(lines) - i:,} more lines"]
    return lines


def _without_empty_hunks(lines: list[str]) -> Iterator[str]:
    """A diff without the heads of hunks that have no line left."""
    for line, after in zip(lines, [*lines[1:], "@@"], strict=True):
        if not (line.startswith("@@") and after.startswith("@@")):
            yield line

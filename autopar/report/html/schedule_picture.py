"""A schedule as a picture: one row per rank, one box per action, time to scale. The SVG text is self-contained.

    Path("1f1b.svg").write_text(svg(timeline, title="1f1b"))

Boxes hold microbatch numbers where they fit, and say the rest when the mouse is over them. Later stages of a rank are
fainter, or later token slices where there are slices. Actions that a rank runs at the same time share its row. Colours
follow the reader's light or dark mode.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.report.chrome_trace import Event, events_of
from autopar.report.html.page import Section, facts
from autopar.report.schedule_summary import grid, timeline_facts
from autopar.report.svg import WIDTH, framed, px, ticks
from autopar.schedule.order import PARAMETERS, TRANSFERS, Action
from autopar.schedule.simulate import Timeline

KINDS = {
    "F": "forward",
    "B": "backward to inputs",
    "W": "backward to weights",
    "BW": "backward",
    "BWR": "backward and reduce",
    "G": "gather parameters",
    "R": "reduce gradients",
}
_TOP, _LEFT, _RIGHT, _PAD = 60, 86, 92, 14  # pixels around the rows: title and legend, rank names, peak memory
_AXIS, _GAP = 30, 30  # below a panel; between two
_SIZE = 11.0  # of letters; a digit is 0.6 of it wide
_STYLE = """
.schedule { --back: #ffffff; --ink: #1c2330; --muted: #677084; --line: #e1e5ec; --row: #eef1f5;
  --F: #7fb0f5; --B: #63c7a0; --W: #f3c65c; --BW: #e38fb4; --BWR: #cf6a99; --G: #b9a7ea; --R: #a7afbd;
  font: 11px system-ui, "DejaVu Sans", sans-serif; max-width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { .schedule { --back: #1a1f28; --ink: #e6ebf4; --muted: #8e98ab; --line: #2b3240;
  --row: #212733; --F: #3467bd; --B: #23805f; --W: #92690f; --BW: #9c4372; --BWR: #b95a8b; --G: #6650b0;
  --R: #5b6473; } }
.schedule text { fill: var(--ink); }
.schedule .title { font-size: 15px; font-weight: 600; }
.schedule .faint { fill: var(--muted); }
.schedule .box text { text-anchor: middle; pointer-events: none; }
.schedule .end { text-anchor: end; }
.schedule .mid { text-anchor: middle; }
.schedule .back { fill: var(--back); }
.schedule .row { fill: var(--row); }
.schedule .peak { fill: var(--muted); fill-opacity: .45; }
.schedule .tick { stroke: var(--line); }
"""


def svg(
    timeline: Timeline, title: str = "", measured: Iterable[Event] | None = None, unit: str = "", notes: str = ""
) -> str:
    """The picture as SVG text.

    measured: (rank, action, start, end) of a real run in the timeline's unit, drawn below it at the same scale.
    unit: of times, such as "ms". notes: a line below the title.
    """
    panels = [_SchedulePanel.of("simulated" if measured is not None else "", events_of(timeline), timeline.memory)]
    if measured is not None:
        panels.append(_SchedulePanel.of("measured", measured))
    rows = max((panel.rows for panel in panels), default=0)
    look = _Look.of(rows, max(panel.span for panel in panels), unit)
    parts: list[str] = []
    top = float(_TOP)
    for panel in panels:
        top += _GAP / 2 if panel.name else 0
        parts += _panel(panel, look, top, rows)
        top += rows * look.row + _AXIS + (_GAP / 2 if panel is not panels[-1] else 0)
    head = [*_title(title, notes), *_legend(panels)]
    style = _STYLE + "".join(f".schedule .{kind} {{ fill: var(--{kind}); }}\n" for kind in KINDS)
    return framed("schedule", title or "pipeline schedule", style, top, [*head, *parts])


# --- contents -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ActionBox:
    """An action in lane ``lane`` of ``lanes`` of its rank's row, in tone ``tone`` of its colour."""

    event: Event
    tone: int
    lane: int = 0
    lanes: int = 1


@dataclass(frozen=True)
class _SchedulePanel:
    """One run: boxes, and the peak memory of each rank (none: unknown)."""

    name: str
    boxes: Sequence[_ActionBox]
    tones: int
    peak: Sequence[float] = ()

    @staticmethod
    def of(name: str, events: Iterable[Event], peak: Sequence[float] = ()) -> _SchedulePanel:
        events = [e for e in events if e[1].kind not in TRANSFERS and e[3] > e[2]]  # transfers are lines
        slices = {e[1].slice for e in events}
        stages = _stages(events)
        if len(slices) > 1:
            tone = {e[1]: e[1].slice for e in events}
        else:
            tone = {e[1]: stages[e[0]].index(e[1].stage) for e in events}
        return _SchedulePanel(name, _boxes(events, tone), max(tone.values(), default=0) + 1, peak)

    @cached_property
    def sliced(self) -> bool:
        return any(box.event[1].slice for box in self.boxes)

    @cached_property
    def rows(self) -> int:
        return max((box.event[0] + 1 for box in self.boxes), default=0)

    @cached_property
    def origin(self) -> float:
        return min((box.event[2] for box in self.boxes), default=0.0)

    @cached_property
    def span(self) -> float:
        return max((box.event[3] for box in self.boxes), default=0.0) - self.origin


@dataclass(frozen=True)
class _Look:
    """Sizes: of a row, of a unit of time, and how times are written."""

    row: float
    scale: float
    decimals: int
    unit: str

    @staticmethod
    def of(rows: int, span: float, unit: str) -> _Look:
        row = min(26.0, max(9.0, 420 / max(rows, 1)))
        scale = (WIDTH - _LEFT - _RIGHT) / (span or 1.0)
        return _Look(row, scale, max(0, 3 - math.floor(math.log10(span or 1.0))), f" {unit}" if unit else "")

    def time(self, value: float) -> str:
        text = f"{value:,.{self.decimals}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text


def _stages(events: Iterable[Event]) -> dict[int, list[int]]:
    """Rank -> its stages, first part of the model first."""
    stages: dict[int, set[int]] = {}
    for rank, action, _, _ in events:
        stages.setdefault(rank, set()).add(action.stage)
    return {rank: sorted(found) for rank, found in stages.items()}


def _boxes(events: Iterable[Event], tone: Mapping[Action, int]) -> list[_ActionBox]:
    """Boxes in rows; actions of a rank that overlap in time get lanes."""
    events = sorted(events, key=lambda e: (e[0], e[2], e[3]))
    span = max((e[3] for e in events), default=0.0) - min((e[2] for e in events), default=0.0)
    out: list[_ActionBox] = []
    group: list[Event] = []
    for event in [*events, None]:
        busy = max((e[3] for e in group), default=0.0)
        if group and (event is None or event[0] != group[0][0] or event[2] >= busy - 1e-9 * span):
            out += [_ActionBox(e, tone[e[1]], lane, len(group)) for lane, e in enumerate(group)]
            group = []
        if event is not None:
            group.append(event)
    return out


# --- drawing -------------------------------------------------------------------------------------------


def _panel(panel: _SchedulePanel, look: _Look, top: float, rows: int) -> Iterator[str]:
    bottom, right = top + rows * look.row, WIDTH - _RIGHT
    if panel.name:
        yield f'<text class="faint" x="{_PAD}" y="{px(top - 7)}">{panel.name}</text>'
    stages = _stages(box.event for box in panel.boxes)
    for rank in range(rows):
        y = top + rank * look.row
        height = look.row - (2 if look.row > 12 else 1)
        yield f'<rect class="row" x="{_LEFT}" y="{px(y)}" width="{right - _LEFT}" height="{px(height)}"/>'
        label = f"rank {rank}"
        if 1 < len(found := stages.get(rank, [])) < 4 and look.row >= 14:
            label += f'<tspan class="faint" font-size="9"> · {", ".join(map(str, found))}</tspan>'
        size = min(_SIZE, look.row)
        yield f'<text x="{_PAD}" y="{px(y + height / 2 + 0.36 * size)}"{_font(size)}>{label}</text>'
    yield from _axis(panel, look, top, bottom)
    for box in panel.boxes:
        yield _box(box, panel, look, top)
    yield from _peaks(panel, look, top)


def _box(box: _ActionBox, panel: _SchedulePanel, look: _Look, top: float) -> str:
    rank, action, _, _ = box.event
    start, end = (time - panel.origin for time in box.event[2:])
    whole = look.row - (2 if look.row > 12 else 1)
    height = whole / box.lanes
    x, width = _LEFT + start * look.scale, (end - start) * look.scale
    y = top + rank * look.row + box.lane * height
    gap = min(1.0, width / 8)
    times = f"{look.time(start)}-{look.time(end)}{look.unit}"
    label = action.kind if action.kind in PARAMETERS else str(action.microbatch)
    size = min(_SIZE, 0.85 * height, (width - gap - 1) / (0.6 * len(label)))
    text = ""
    if size >= 6.5:
        middle = f'x="{px(x + (width - gap) / 2)}" y="{px(y + height / 2 + 0.36 * size)}"'
        text = f"<text {middle}{_font(size)}>{label}</text>"
    return (
        f'<g class="box"><rect class="{action.kind}" x="{px(x)}" y="{px(y)}" width="{px(width - gap)}" '
        f'height="{px(height)}"{_opacity(box.tone, panel.tones)}>'
        f"<title>{str(action).rstrip('&')}, {times}</title></rect>{text}</g>"
    )


def _font(size: float) -> str:
    return "" if size == _SIZE else f' font-size="{px(size)}"'


def _opacity(tone: int, tones: int) -> str:
    return f' fill-opacity="{1 - 0.55 * tone / (tones - 1):.2f}"' if tone else ""


def _axis(panel: _SchedulePanel, look: _Look, top: float, bottom: float) -> Iterator[str]:
    for value in ticks(panel.span):
        x = px(_LEFT + value * look.scale)
        yield f'<line class="tick" x1="{x}" x2="{x}" y1="{px(top)}" y2="{px(bottom + 4)}"/>'
        yield f'<text class="faint mid" x="{x}" y="{px(bottom + 15)}">{look.time(value)}{look.unit}</text>'


def _peaks(panel: _SchedulePanel, look: _Look, top: float) -> Iterator[str]:
    """A bar and a number per rank at the right edge."""
    if not panel.peak:
        return
    x, width, most = WIDTH - _RIGHT + 8, _RIGHT - 8 - _PAD, max(panel.peak) or 1.0
    yield f'<text class="faint end" x="{WIDTH - _PAD}" y="{px(top - 7)}">peak memory</text>'
    for rank, value in enumerate(panel.peak):
        height = look.row - (2 if look.row > 12 else 1)
        y, size = top + rank * look.row, min(_SIZE, look.row)
        yield f'<rect class="peak" x="{x}" y="{px(y)}" width="{px(width * value / most)}" height="{px(height)}"/>'
        where = f'x="{x + 4}" y="{px(y + height / 2 + 0.36 * size)}"{_font(size)}'
        yield f"<text {where}>{value:.4g}</text>"


def _title(title: str, notes: str) -> Iterator[str]:
    if title:
        yield f'<text class="title" x="{_PAD}" y="23">{html.escape(title)}</text>'
    if notes:
        yield f'<text class="faint" x="{_PAD}" y="40" font-size="11">{html.escape(notes)}</text>'


def _legend(panels: Sequence[_SchedulePanel]) -> Iterator[str]:
    """Swatches at the top right, as many tones as a rank has stages."""
    boxes = [box for panel in panels for box in panel.boxes]
    kinds = [kind for kind in KINDS if any(box.event[1].kind == kind for box in boxes)]
    tones = max(panel.tones for panel in panels)
    shown = min(tones, 4)
    x = float(WIDTH - _PAD)
    for kind in reversed(kinds):
        x -= 5.9 * len(KINDS[kind])
        yield f'<text x="{px(x)}" y="23">{KINDS[kind]}</text>'
        size = 8 if shown > 1 else 11
        x -= size * shown + 5
        for tone in range(shown):
            place = f'x="{px(x + size * tone)}" y="14" width="{size}" height="11"'
            yield f'<rect class="{kind}" {place}{_opacity(tone, shown)}/>'
        x -= 14
    if tones > 1:
        what = "later token slices" if any(panel.sliced for panel in panels) else "later stages of the rank"
        yield f'<text class="faint end" x="{WIDTH - _RIGHT}" y="40">fainter: {what}</text>'


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

"""Attention over ranks as a picture: per rank a lane of computation and a lane for each way of its exchanges, to scale.

    Path("ring.svg").write_text(timeline_svg({"ring, forward": timeline}, "ring", unit="ms"))

    rank 1   |  1  |  0  |  3  |  2  |      whose packet it computes on
      up     |k, v→2|k, v→2|k, v→2|         what it sends, and to whom; where from is said when the mouse is over it

One SVG text that needs nothing else, for one timeline or several below each other at the same scale. Colours follow the
reader's light or dark mode.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.attention.program import CollectiveEvent, ComputeEvent, ExchangeEvent
from autopar.cost.attention_timeline import AttentionTimeline, TimedEvent
from autopar.report.svg import WIDTH, framed, px, ticks

# Lanes below the computation, in this order, and the words for them.
WAYS = {
    "up": "up",
    "down": "down",
    "home": "home",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
}
MOST_RANKS = 8  # of more, the first ones are drawn

_TOP, _LEFT, _RIGHT, _PAD = 56, 128, 20, 14  # pixels around the lanes: title, names
_BOX, _LANE, _BETWEEN = 18, 12, 7  # heights: of computation, of a way, between two ranks
_HEAD, _AXIS, _GAP = 22, 26, 14  # of a panel: its name, its times; between two
_STYLE = """
.attention { --back: #ffffff; --ink: #1c2330; --muted: #677084; --line: #e1e5ec; --row: #eef1f5; --own: #7fb0f5;
  --other: #bcd5fa; --up: #63c7a0; --down: #f3c65c; --home: #e38fb4; --all: #b9a7ea;
  font: 11px system-ui, "DejaVu Sans", sans-serif; max-width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { .attention { --back: #1a1f28; --ink: #e6ebf4; --muted: #8e98ab; --line: #2b3240;
  --row: #212733; --own: #3467bd; --other: #2a4a80; --up: #23805f; --down: #92690f; --home: #9c4372; --all: #6650b0; } }
.attention text { fill: var(--ink); }
.attention .title { font-size: 15px; font-weight: 600; }
.attention .name { font-weight: 600; }
.attention .faint { fill: var(--muted); }
.attention .box text, .attention .mid { text-anchor: middle; pointer-events: none; }
.attention .back { fill: var(--back); }
.attention .row { fill: var(--row); }
.attention .tick { stroke: var(--line); }
.attention .own { fill: var(--own); } .attention .other { fill: var(--other); } .attention .up { fill: var(--up); }
.attention .down { fill: var(--down); } .attention .home { fill: var(--home); } .attention .all { fill: var(--all); }
"""


def timeline_svg(panels: Mapping[str, AttentionTimeline], title: str = "", notes: str = "") -> str:
    """The picture of named timelines as SVG text; times are drawn in milliseconds."""
    drawn = [_AttentionPanel(name, timeline) for name, timeline in panels.items()]
    span = max((panel.timeline.seconds for panel in drawn), default=0.0) or 1.0
    parts: list[str] = []
    top = float(_TOP)
    for panel in drawn:
        parts += _panel(panel, (WIDTH - _LEFT - _RIGHT) / span, top)
        top += panel.height + _GAP
    head = [f'<text class="title" x="{_PAD}" y="23">{html.escape(title)}</text>'] if title else []
    head += [f'<text class="faint" x="{_PAD}" y="41">{html.escape(notes)}</text>'] if notes else []
    return framed("attention", title or "attention over ranks", _STYLE, top, [*head, *parts])


@dataclass(frozen=True)
class _AttentionPanel:
    """One timeline, and where its lanes are."""

    name: str
    timeline: AttentionTimeline

    @cached_property
    def ranks(self) -> int:
        return min(MOST_RANKS, len(self.timeline.busy))

    @cached_property
    def ways(self) -> Sequence[str]:
        used = {span.what for span in self.timeline.spans}
        return [way for way in WAYS if way in used]

    @property
    def row(self) -> int:
        """Height of a rank."""
        return _BOX + _LANE * len(self.ways) + _BETWEEN

    @property
    def height(self) -> int:
        return _HEAD + self.ranks * self.row + _AXIS

    def lane(self, rank: int, what: str) -> tuple[int, int]:
        """(offset from the first rank, height) of a lane."""
        first = rank * self.row
        return (first, _BOX) if what == "compute" else (first + _BOX + _LANE * self.ways.index(what), _LANE)


def _panel(panel: _AttentionPanel, scale: float, top: float) -> Iterator[str]:
    timeline, lanes = panel.timeline, top + _HEAD
    ranks = len(timeline.busy)
    left_out = f"; the first {panel.ranks} of {ranks} ranks" if panel.ranks < ranks else ""
    times = f"{_ms(timeline.seconds)}, of which {_ms(timeline.exposed)} exposed; ideal {_ms(timeline.ideal)}"
    yield (
        f'<text x="{_PAD}" y="{px(top + 14)}"><tspan class="name">{html.escape(panel.name)}</tspan>'
        f'<tspan class="faint" dx="10">{times}{left_out}</tspan></text>'
    )
    for rank in range(panel.ranks):
        yield f'<text x="{_PAD}" y="{px(lanes + rank * panel.row + 13)}">rank {rank}</text>'
        for what in ("compute", *panel.ways):
            y, height = panel.lane(rank, what)
            width = WIDTH - _LEFT - _RIGHT
            yield f'<rect class="row" x="{_LEFT}" y="{px(lanes + y)}" width="{width}" height="{height - 1}"/>'
            if what != "compute":
                yield f'<text class="faint" x="{_PAD + 50}" y="{px(lanes + y + 9)}" font-size="9">{WAYS[what]}</text>'
    bottom = lanes + panel.ranks * panel.row - _BETWEEN
    for value in ticks((WIDTH - _LEFT - _RIGHT) / scale * 1e3):
        at = px(_LEFT + value * 1e-3 * scale)
        yield f'<line class="tick" x1="{at}" x2="{at}" y1="{px(lanes)}" y2="{px(bottom + 4)}"/>'
        yield f'<text class="faint mid" x="{at}" y="{px(bottom + 15)}">{value:g} ms</text>'
    for span in timeline.spans:
        if span.rank < panel.ranks:
            y, height = panel.lane(span.rank, span.what)
            yield _box(span, _LEFT + span.start * scale, (span.end - span.start) * scale, lanes + y, height)


def _box(span: TimedEvent, x: float, width: float, y: float, height: int) -> str:
    labels, says, kind = _texts(span)
    gap, size = min(1.0, width / 8), 10.5 if height == _BOX else 8.5
    label = next((text for text in labels if 0.62 * size * len(text) <= width - gap - 2), "")
    middle = f'x="{px(x + (width - gap) / 2)}" y="{px(y + (height - 1) / 2 + 0.36 * size)}" font-size="{px(size)}"'
    times = f"{_ms(span.start)} to {_ms(span.end)}"
    return (
        f'<g class="box"><rect class="{kind}" x="{px(x)}" y="{px(y)}" width="{px(width - gap)}" height="{height - 1}">'
        f"<title>{html.escape(says)}, {times}</title></rect>"
        + (f"<text {middle}>{html.escape(label)}</text>" if label else "")
        + "</g>"
    )


def _texts(span: TimedEvent) -> tuple[Sequence[str], str, str]:
    """(labels, longest first; what the mouse finds; class) of a box."""
    event = span.event
    if isinstance(event, ComputeEvent):
        return _compute_texts(span.rank, event)
    if isinstance(event, CollectiveEvent):
        labels = [f"{WAYS[event.kind]} {event.what}", event.what]
        return labels, f"{WAYS[event.kind]} of {event.what} among {len(event.ranks)} ranks", "all"
    return _exchange_texts(span.rank, event)


def _compute_texts(rank: int, event: ComputeEvent) -> tuple[Sequence[str], str, str]:
    """The packet that is here on its way: the columns if they are another rank's, else the rows."""
    queries, keys = (f"of {owner}" if owner >= 0 else "of several" for owner in (event.queries_of, event.keys_of))
    says = f"rank {rank}: {event.rows} queries {queries}, {event.columns} keys {keys}, {event.pairs} pairs"
    owners = [owner for owner in (event.keys_of, event.queries_of) if owner not in (rank, -1)]
    if owners:
        what = "k" if event.keys_of == owners[0] else "q"
        return [f"{what} of {owners[0]}", str(owners[0])], says, "other"
    return ["own" if -1 not in (event.queries_of, event.keys_of) else "all"], says, "own"


def _exchange_texts(rank: int, event: ExchangeEvent) -> tuple[Sequence[str], str, str]:
    says = f"{event.what}: "
    says += ", ".join(
        [f"{rank} -> {event.to}, {event.sent} bytes"] * (event.to >= 0)
        + [f"{event.source} -> {rank}, {event.received} bytes"] * (event.source >= 0)
    )
    if event.to < 0:
        return [f"from {event.source}", f"←{event.source}"], says, event.way
    return [f"{event.what} →{event.to}", f"→{event.to}"], says, event.way


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"

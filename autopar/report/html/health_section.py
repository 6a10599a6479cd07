"""How ranks have spent the last minute, in the report: a bar for each.

rank 0 (dp=0)     [computing       ][waiting for dp][outside of steps]
rank 1 (dp=1)     [computing                       ][outside of steps]     12% longer
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from autopar.report.html.page import Section
from autopar.report.svg import WIDTH, framed, px

SECTION = "How ranks spend their time"
_LEFT, _RIGHT, _ROW, _TOP = 230.0, 110.0, 22.0, 40.0
_STYLE = """
.health text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink, #222); }
.health .head { fill: var(--muted, #777); }
.health .slow { fill: #d2691e; font-weight: 600; }
.health .back { fill: var(--card, #fff); }
.health .part { fill: var(--accent, #2a6fdb); }
.health .edge { fill: none; stroke: var(--line, #ddd); }
"""
Rows = Sequence[tuple[str, Mapping[str, float], str]]  # name of a rank, seconds by what they were spent on, a remark


def health_sections(rows: Rows) -> list[Section]:
    """The section, for ranks that have run steps."""
    return [Section(SECTION, time_bars(rows))] if any(spent for _, spent, _ in rows) else []


def time_bars(rows: Rows) -> str:
    """SVG text: a bar for each rank, the first cause darkest."""
    causes = list(dict.fromkeys(cause for _, spent, _ in rows for cause in spent))
    shades = {cause: 1.0 - 0.88 * i / max(1, len(causes) - 1) for i, cause in enumerate(causes)}
    parts = _legend(shades)
    for i, (name, spent, remark) in enumerate(rows):
        parts += _row(_TOP + _ROW * i, name, spent, remark, shades)
    return framed("health", "How ranks have spent the last minute", _STYLE, _TOP + _ROW * len(rows) + 10, parts)


def _legend(shades: Mapping[str, float]) -> list[str]:
    parts, x = [], _LEFT
    for cause, shade in shades.items():
        parts.append(f'<rect class="part" x="{px(x)}" y="11" width="11" height="11" fill-opacity="{px(shade)}"/>')
        parts.append(f'<text class="head" x="{px(x + 16)}" y="21">{html.escape(cause)}</text>')
        x += 34 + 6.4 * len(cause)
    return parts


def _row(y: float, name: str, spent: Mapping[str, float], remark: str, shades: Mapping[str, float]) -> list[str]:
    whole, x, middle = sum(spent.values()), _LEFT, px(y + _ROW / 2 + 4)
    parts = [f'<text x="14" y="{middle}">{html.escape(name)}</text>']
    for cause, seconds in spent.items():
        width = (WIDTH - _LEFT - _RIGHT) * seconds / whole if whole else 0.0
        parts.append(
            f'<rect class="part" x="{px(x)}" y="{px(y + 2)}" width="{px(width)}" height="{px(_ROW - 4)}" '
            f'fill-opacity="{px(shades[cause])}"><title>{html.escape(f"{name}: {cause} {seconds:.1f} s")}, '
            f"{seconds / max(whole, 1e-9):.0%}</title></rect>"
        )
        x += width
    edge = WIDTH - _LEFT - _RIGHT
    parts.append(f'<rect class="edge" x="{px(_LEFT)}" y="{px(y + 2)}" width="{px(edge)}" height="{px(_ROW - 4)}"/>')
    parts.append(f'<text class="slow" x="{px(WIDTH - 14)}" y="{middle}" text-anchor="end">{html.escape(remark)}</text>')
    return parts

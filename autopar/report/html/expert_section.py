"""Expert load in the report of a traced step: a heat map of experts by layer, and the bytes that left each rank.

    layer                     experts 0 ... E-1               most / mean
    model.layers.0.mlp        [][][][][][][][]                       1.42

A cell's colour is the share of its layer's tokens that chose the expert: the paper for none, the accent for twice the
mean and more.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from autopar.cost.traffic import step_communication
from autopar.ir.traffic import Traffic
from autopar.report.html.page import Section, table
from autopar.report.svg import WIDTH, framed, px
from autopar.report.tables import human_bytes
from autopar.steps.graphs import Compiled

SECTION = "Experts"
_LEFT, _RIGHT, _ROW, _TOP = 260.0, 90.0, 22.0, 34.0
_STYLE = """
.load text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink, #222); }
.load .head, .load .note { fill: var(--muted, #777); }
.load .back { fill: var(--card, #fff); }
.load .cell { fill: var(--accent, #2a6fdb); }
.load .edge { fill: none; stroke: var(--line, #ddd); }
"""
Load = Mapping[str, Sequence[int]]  # layer -> tokens that chose each expert
Sent = Mapping[str, Sequence[int]]  # axis, or level of it -> bytes of rows that left each rank


def expert_sections(compiled: Compiled, load: Load, sent: Sent) -> list[Section]:
    """The section, for a model whose expert load has been counted."""
    return [Section(SECTION, heat_map(load) + _exchanged(compiled, sent))] if load else []


def heat_map(load: Load) -> str:
    """SVG text: a row for each layer, a cell for each expert."""
    height = _TOP + _ROW * len(load) + 10
    parts = [
        '<text class="head" x="14" y="20">tokens of each expert, by layer</text>',
        f'<text class="head" x="{px(WIDTH - 14)}" y="20" text-anchor="end">most / mean</text>',
    ]
    for i, (layer, counts) in enumerate(load.items()):
        parts += _row(_TOP + _ROW * i, layer, counts)
    return framed("load", "Tokens that chose each expert of each layer", _STYLE, height, parts)


def _row(y: float, layer: str, counts: Sequence[int]) -> list[str]:
    total, number = sum(counts), len(counts)
    mean, width = total / number, (WIDTH - _LEFT - _RIGHT) / number
    middle = px(y + _ROW / 2 + 4)
    parts = [f'<text x="14" y="{middle}">{html.escape(_short(layer))}<title>{html.escape(layer)}</title></text>']
    for expert, count in enumerate(counts):
        share = min(count / (2 * mean), 1.0) if mean else 0.0
        parts.append(
            f'<rect class="cell" x="{px(_LEFT + width * expert)}" y="{px(y + 2)}" width="{px(width)}" '
            f'height="{px(_ROW - 4)}" fill-opacity="{px(share)}"><title>{html.escape(layer)}, expert {expert}: {count} '
            f"of {total} ({count / max(total, 1):.1%})</title></rect>"
        )
    parts.append(
        f'<rect class="edge" x="{px(_LEFT)}" y="{px(y + 2)}" width="{px(width * number)}" height="{px(_ROW - 4)}"/>'
    )
    worst = f"{max(counts) / mean:.2f}" if mean else "none"
    parts.append(f'<text class="note" x="{px(WIDTH - 14)}" y="{middle}" text-anchor="end">{worst}</text>')
    return parts


def _short(layer: str, most: int = 36) -> str:
    """The end of a long name."""
    return layer if len(layer) <= most else f"…{layer[1 - most :]}"


def _exchanged(compiled: Compiled, sent: Sent) -> str:
    """Rows for experts that left a rank in the step, compared with even routing; "" if none are exchanged."""
    even = step_communication(compiled)
    rows = []
    for axis, found in sent.items():
        volume = even.get((axis, "all_to_all_rows"), Traffic())
        sizes = (volume.bytes, min(found), sum(found) / len(found), max(found))
        rows.append((axis, str(volume.calls), *(human_bytes(round(size)) for size in sizes)))
    if not rows:
        return ""
    head = ("axis", "exchanges", "even routing", "least of a rank", "mean", "most of a rank")
    hint = "<p class=muted>Bytes of rows for experts that left a rank in this step, forward and backward.</p>"
    return hint + table(head, rows, numeric=(1, 2, 3, 4, 5))

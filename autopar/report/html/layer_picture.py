"""One layer as a picture: its modules in the order in which they run, how weights are sharded, what is exchanged.

    forward              |  q_proj  Linear            |  backward
                         |  output features over tp   |  tp all-reduce 112 MiB
    tp all-reduce 112 MiB|  o_proj  Linear            |

Of layers that are alike one is drawn, with the numbers of one.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost.stage_costs import TimesOfGraphs
from autopar.cost.step_estimate import BACKWARD, FORWARD, Exchanged
from autopar.ir.graph import module_path
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.report.model_tree import ModuleRow, WeightRow
from autopar.report.svg import framed, px
from autopar.report.tables import human_bytes, human_seconds
from autopar.steps.graphs import Compiled

_ROW, _LINE, _PILL, _HEAD = 50.0, 15.0, 19.0, 84.0  # heights: least of a box, lines within and beside it, the head
_BOX = (320.0, 360.0)  # left edge and width of the boxes
_MOST_PIECES = 8  # that an icon shows
_STYLE = """
.layer { --back: #ffffff; --ink: #1c2330; --muted: #677084; --line: #c9d0da; --box: #f3f5f8; --mine: #2f6fde;
  --F: #7fb0f5; --B: #63c7a0; font: 12px system-ui, "DejaVu Sans", sans-serif; max-width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { .layer { --back: #1a1f28; --ink: #e6ebf4; --muted: #8e98ab; --line: #3a4353;
  --box: #232a36; --mine: #6ea2ff; --F: #3467bd; --B: #23805f; } }
.layer text { fill: var(--ink); }
.layer .title { font-size: 15px; font-weight: 600; }
.layer .faint { fill: var(--muted); }
.layer .mid { text-anchor: middle; }
.layer .end { text-anchor: end; }
.layer .back { fill: var(--back); }
.layer .box { fill: var(--box); stroke: var(--line); }
.layer .mine { fill: var(--mine); }
.layer .cut { fill: none; stroke: var(--muted); }
.layer .F { stroke: var(--F); fill: none; stroke-width: 2; }
.layer .B { stroke: var(--B); fill: none; stroke-width: 2; }
"""


@dataclass(frozen=True)
class _Step:
    """A module of the layer, with its exchanges in each direction, for one layer."""

    row: ModuleRow
    name: str
    forward: Sequence[str]
    backward: Sequence[str]
    seconds: float

    @property
    def height(self) -> float:
        """Height of its box."""
        lanes = max(len(self.forward), len(self.backward))
        return max(_ROW, 32 + _LINE * len(self.words), 12 + _PILL * lanes)

    @property
    def _has_room(self) -> bool:
        return len(self.name) + len(self.row.kind) < _LETTERS

    @property
    def title(self) -> tuple[str, str]:
        """Name and class, as far as the first line of the box has room for them."""
        short = self.name if len(self.name) <= _LETTERS else f"…{self.name[1 - _LETTERS :]}"
        return short, f" {self.row.kind}" if self._has_room else ""

    @property
    def words(self) -> list[str]:
        """How the weights are sharded, one line per axis; before that the class, if the first line is full."""
        kind = [] if self._has_room else [self.row.kind]
        return kind + [
            f"{weight.name + ': ' if not i else ''}{cut}"
            for weight in self.row.weights
            for i, cut in enumerate(weight.cuts or ("whole",))
        ]


_LETTERS = 30  # of the name and the class, beside the time


def layer_picture(root: ModuleRow, compiled: Compiled, times: TimesOfGraphs) -> str:
    """SVG text of the layer that is there most often, "" for a model without repeated layers."""
    repeated = [row for row in root.all() if row.count > 1 and (row.children or row.weights)]
    if not repeated:
        return ""
    layer = max(repeated, key=lambda row: (row.count, row.total.forward))
    steps = list(_steps(layer, _places(compiled, times)))
    title = f"One of {layer.count} layers {layer.name}: {layer.kind}"
    return framed("layer", title, _STYLE, *_drawn(steps, title, compiled.plan.mesh))


def _places(compiled: Compiled, times: TimesOfGraphs) -> dict[str, int]:
    """Path -> position in the forward of the longest of the module's own calls."""
    found: dict[str, tuple[float, int]] = {}
    graphs = [part.forward.graph for part in compiled.pipeline.parts]
    nodes = [(node, times(gm).computing) for gm in graphs for node in gm.graph.nodes]
    for place, (node, computing) in enumerate(nodes):
        path = module_path(node)
        found[path] = max(found.get(path, (-1.0, 0)), (computing.get(node, 0.0), place))
    return {path: place for path, (_, place) in found.items()}


def _steps(layer: ModuleRow, places: dict[str, int]) -> Iterator[_Step]:
    shown = [row for row in layer.all() if row.weights or row.own.exchanged or row.own.forward]
    for row in sorted(shown, key=lambda row: places.get(row.paths[0], 0)):
        cost, name = row.own, row.paths[0].removeprefix(layer.paths[0]).lstrip(".")
        ways = {way: [_words(k, x, row.count) for k, x in cost.exchanged.items() if k[2] == way] for way in _WAYS}
        seconds = (cost.forward + cost.backward) / row.count
        yield _Step(row, name or "the layer itself", ways[FORWARD], ways[BACKWARD], seconds)


_WAYS = (FORWARD, BACKWARD)


def _words(way: tuple[str, str, str], x: Exchanged, count: int) -> str:
    axis, kind, _ = way
    late = f", {human_seconds(x.exposed / count)} exposed" if x.exposed > 0.05 * x.seconds else ""
    return f"{axis} {kind.replace('_', '-')} {human_bytes(x.bytes / count)}{late}"


# --- drawing -----------------------------------------------------------------------------------------------------


def _drawn(steps: Sequence[_Step], title: str, mesh: Mesh) -> tuple[float, list[str]]:
    left, width = _BOX
    parts = [
        f'<text class="title" x="20" y="28">{html.escape(title)}</text>',
        '<text class="faint" x="20" y="50">What a rank sends for one layer in a step; filled: its shard of a '
        "weight</text>",
        f'<text class="faint end" x="{px(left - 24)}" y="72">forward ↓</text>',
        f'<text class="faint" x="{px(left + width + 24)}" y="72">↑ backward</text>',
    ]
    top = _HEAD
    for step in steps:
        parts += _box(step, top, mesh)
        top += step.height + 12
    for x, kind in ((left - 12, "F"), (left + width + 12, "B")):
        parts.insert(0, f'<line class="{kind}" x1="{px(x)}" x2="{px(x)}" y1="{px(_HEAD)}" y2="{px(top - 12)}"/>')
    return top + 8, parts


def _box(step: _Step, top: float, mesh: Mesh) -> Iterator[str]:
    left, width = _BOX
    yield f'<rect class="box" x="{px(left)}" y="{px(top)}" width="{px(width)}" height="{px(step.height)}" rx="6"/>'
    name, kind = map(html.escape, step.title)
    kind = f'<tspan class="faint" font-weight="400">{kind}</tspan>'
    yield f'<text x="{px(left + 66)}" y="{px(top + 19)}" font-weight="600">{name}{kind}</text>'
    yield f'<text class="faint end" x="{px(left + width - 10)}" y="{px(top + 19)}">{human_seconds(step.seconds)}</text>'
    for i, words in enumerate(step.words):
        yield f'<text class="faint" x="{px(left + 66)}" y="{px(top + 36 + _LINE * i)}">{html.escape(words)}</text>'
    matrix = next((w for w in step.row.weights if len(w.spec.shape) > 1), None)
    if matrix is not None:
        yield from _icon(matrix, left + 12, top + 10, mesh)
    for lane, x, anchor in ((step.forward, left - 24, "end"), (step.backward, left + width + 24, "")):
        for i, text in enumerate(lane):
            y = top + 18 + _PILL * i
            yield f'<text class="{anchor}" x="{px(x)}" y="{px(y)}">{html.escape(text)}</text>'


def _icon(weight: WeightRow, x: float, y: float, mesh: Mesh) -> Iterator[str]:
    """The matrix as it is stored: lines between shards, one of which is filled."""
    width, height = 40.0, 30.0
    cuts = {p.dim: mesh.size(a) for a, p in weight.spec.placements.items() if isinstance(p, Shard) and p.dim < 2}
    rows, columns = (min(cuts.get(dim, 1), _MOST_PIECES) for dim in (0, 1))
    if rows * columns > 1:
        mine = f'width="{px(width / columns)}" height="{px(height / rows)}"'
        yield f'<rect class="mine" x="{px(x)}" y="{px(y)}" {mine}/>'
    lines = [f"M{px(x)} {px(y + height * i / rows)}h{px(width)}" for i in range(rows + 1)]
    lines += [f"M{px(x + width * i / columns)} {px(y)}v{px(height)}" for i in range(columns + 1)]
    yield f'<path class="cut" d="{"".join(lines)}"/>'

"""The model, first in the report: its modules as a tree that folds, each with how its weights are cut, what it holds on
a rank, what it exchanges and how long it takes; layers that are alike are one row. HTML for
`autopar.report.html.page`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator

from autopar.cost.module_costs import Exchanged, ModuleCost
from autopar.report.formatting import human_bytes, human_count, human_seconds
from autopar.report.graph_text import DTYPES
from autopar.report.html.page import Section, legend
from autopar.report.model_tree import ModuleRow, WeightRow, by_kind

TITLE = "Model"
MOST_OPEN = 60  # rows of a tree that is shown whole; of a larger one the first levels are
COLUMNS = ("module", "how it is cut", "weights on a rank", "kept for the backward", "exchanged in a step", "computes")
LEGEND = (
    ("over tp, ep", "each rank has its columns, rows or experts of the weight, and computes with these alone"),
    ("in pieces over dp", "ZeRO: a rank stores a piece; the whole is gathered where it is used"),
    (
        "whole",
        "every rank has all of it; where the batch is cut, gradients are summed over dp, dp_replicate, cp and ep",
    ),
    ("exposed", "of a transfer, what computing has to wait for; the rest runs beside computing"),
    ("exchanged", "a blue line: hidden beside computing for the most part; an orange one: computing waits for it"),
    ("computes", "blue: the forward, green: the backward, to the scale of the longest row"),
    ("×4", "so many modules that are alike, added up; point at a number for its parts"),
)


def model_section(root: ModuleRow, times: str) -> Section:
    """``times``: a sentence on what they are estimated for."""
    rows = list(root.all())
    depth = 99 if len(rows) <= MOST_OPEN else 2
    longest = max((row.total.forward + row.total.backward for row in rows), default=0.0) or 1.0
    head = "".join(f"<span>{name}</span>" for name in COLUMNS)
    tree = f"<div class=tree><div class='row head'>{head}</div>{_row(root, depth, longest)}</div>"
    return Section(TITLE, f"<p class=muted>{html.escape(times)}</p>{tree}{legend(LEGEND)}")


def _row(row: ModuleRow, depth: int, longest: float, deep: int = 0) -> str:
    """``depth``: levels that are open, ``deep``: how far in the row stands."""
    cells = "".join(f"<span data-is='{name}'>{cell}</span>" for name, cell in zip(COLUMNS, _cells(row, longest)))
    line = f"<span class=row style='--deep:{deep}' id='m-{html.escape(row.paths[0])}'>{cells}</span>"
    if not row.children:
        return f"<div class=leaf>{line}</div>"
    inner = "".join(_row(child, depth - 1, longest, deep + 1) for child in row.children)
    return f"<details{' open' if depth > 0 else ''}><summary>{line}</summary><div class=inner>{inner}</div></details>"


def _cells(row: ModuleRow, longest: float) -> Iterator[str]:
    cost = row.total
    count = f" <em>×{row.count}</em>" if row.count > 1 else ""
    yield f"<b>{html.escape(row.name or 'the whole model')}</b> <i>{html.escape(row.kind)}</i>{count}"
    yield "".join(map(_weight, row.weights)) or "<i></i>"
    elements = f" <i>of {human_count(row.elements)} parameters</i>" if row.elements else ""
    yield f"{human_bytes(row.bytes)}{elements}" if row.bytes else ""
    yield human_bytes(cost.kept) if cost.kept else ""
    yield "".join(_exchanged(axis, kind, x, cost) for (axis, kind), x in by_kind(cost).items())
    yield _seconds(cost, longest)


def _weight(weight: WeightRow) -> str:
    spec = weight.spec
    shape = f"{DTYPES.get(spec.dtype, spec.dtype)}[{', '.join(map(str, spec.shape))}]"
    how = "; ".join(weight.cuts) or "whole"
    more = [] if spec.requires_grad else ["frozen"]
    more += [f"also {name}" for name in spec.aliases]
    note = f" <i>{html.escape(', '.join(more))}</i>" if more else ""
    why = html.escape("\n".join([f"{weight.name}: {shape}, {human_bytes(weight.bytes)} on a rank", *weight.reasons]))
    return f"<span title='{why}'><u>{html.escape(weight.name)}</u> {html.escape(how)}{note}</span>"


def _exchanged(axis: str, kind: str, x: Exchanged, cost: ModuleCost) -> str:
    ways = [f"{way}: {human_bytes(e.bytes)}" for (a, k, way), e in cost.exchanged.items() if (a, k) == (axis, kind)]
    hidden = 1 - x.exposed / x.seconds if x.seconds else 1.0
    late = f"{human_seconds(x.exposed)} exposed" if hidden < 0.995 else "beside computing"
    title = f"{x.calls:,.4g} calls, {human_seconds(x.seconds)} of transfers, {late}\n" + "\n".join(ways)
    return (
        f"<span class='sent{' late' if hidden < 0.5 else ''}' title='{html.escape(title)}'>"
        f"{html.escape(axis)} {html.escape(kind.replace('_', '-'))} {human_bytes(x.bytes)}</span>"
    )


def _seconds(cost: ModuleCost, longest: float) -> str:
    whole = cost.forward + cost.backward
    if not whole:
        return ""
    parts = ((cost.forward, "F"), (cost.backward, "B"))
    bars = "".join(f"<b class={name} style='width:{100 * part / longest:.2f}%'></b>" for part, name in parts)
    title = f"forward {human_seconds(cost.forward)}, backward {human_seconds(cost.backward)}"
    return f"<span title='{title}'>{human_seconds(whole)}<span class=time>{bars}</span></span>"


def memory_bar(causes: Iterable[tuple[str, int]], title: str) -> str:
    """What is held at the peak, one piece of a bar for each (cause, bytes), with its numbers below."""
    found = [(name, size) for name, size in causes if size > 0]
    whole = sum(size for _, size in found) or 1
    bars = "".join(
        f"<b class=c{i} style='width:{100 * size / whole:.2f}%' title='{html.escape(name)}: {human_bytes(size)}'></b>"
        for i, (name, size) in enumerate(found)
    )
    words = "".join(
        f"<span><b class=c{i}></b>{html.escape(name)} <em>{human_bytes(size)}</em></span>"
        for i, (name, size) in enumerate(found)
    )
    return f"<p class=muted>{html.escape(title)}</p><div class=stack>{bars}</div><div class=stackwords>{words}</div>"

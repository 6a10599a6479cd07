"""The model in the report, before the compiler: step time, modules, one layer, memory."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator

from autopar.cost.axis_shares import repeated
from autopar.cost.memory import Memory, memories
from autopar.cost.stage_costs import times_of_graphs
from autopar.cost.step_estimate import Exchanged, ModuleCost, StepEstimate, step_estimate
from autopar.plan import Plan
from autopar.report.graph_text import DTYPES
from autopar.report.html.layer_picture import layer_picture
from autopar.report.html.page import Section, facts
from autopar.report.model_tree import ModuleRow, WeightRow, by_kind, model_tree
from autopar.report.tables import human_bytes, human_count, human_seconds
from autopar.steps.graphs import Compiled


def model_sections(compiled: Compiled) -> tuple[list[Section], list[tuple[str, str]]]:
    """(sections, (what, value) pairs of the summary) for a compiled model on any mesh."""
    times = times_of_graphs(compiled.plan)
    root, estimate = model_tree(compiled, times), step_estimate(compiled, times)
    held = memories(compiled)
    fullest = max(held, key=lambda m: m.peak)
    tried = advice(compiled.plan, root.total, estimate, fullest)
    sections = [Section("What to try", facts(tried, "findings"))] if tried else []
    sections.append(model_section(root, _basis(estimate, compiled)))
    if picture := layer_picture(root, compiled, times):
        sections.append(Section("One layer", picture))
    where = f" on the fullest rank, {held.index(fullest)} of pp" if len(held) > 1 else " on a rank"
    sections.append(Section("Memory", memory_bar(memory_causes(fullest), f"At the peak of a step,{where}")))
    shown = [
        (f"a step, estimated for {estimate.device}", human_seconds(estimate.seconds)),
        ("of it, exposed transfers", human_seconds(estimate.exposed)),
        ("of it, the optimizer", human_seconds(estimate.optimizer)),
        ("estimated MFU", f"{estimate.utilization:.1%}"),
        ("peak memory of a rank", human_bytes(fullest.peak)),
    ]
    return sections, shown


def _basis(found: StepEstimate, compiled: Compiled) -> str:
    pp = compiled.plan.mesh.size("pp")
    ranks = ", on the ranks that have it" if pp > 1 else ""
    return (
        f"Of a whole step on one rank{ranks}. Times are estimated for {found.device}, over links {found.links}; "
        "hover over a number for details."
    )


def memory_causes(found: Memory) -> list[tuple[str, int]]:
    """(cause, bytes) of what is held at the peak. What is live then but neither steady nor kept by F is one cause: how
    it divides into gradients and working values depends on the moment."""
    kept = min(found.saved, found.peak - found.steady)
    optimizer = found.optimizer if not found.states else 0
    return [
        ("weights", found.parameters),
        ("optimizer states", optimizer),
        ("buffers and batch", found.buffers + found.inputs),
        ("activations kept for the backward", kept),
        ("gradients and temporaries", found.peak - found.steady - kept),
    ]


TITLE = "Model"
MOST_OPEN = 60  # rows of a tree that is shown whole; of a larger one the first levels are
COLUMNS = ("module", "sharding", "weights on a rank", "kept for the backward", "exchanged in a step", "computes")
LEGEND = (
    ("over tp, ep", "each rank has its columns, rows or experts of the weight, and computes with these alone"),
    ("in shards over dp", "ZeRO: a rank stores a shard; the weight is gathered for use"),
    (
        "whole",
        "every rank has all of it; gradients are summed over axes that shard the batch: dp, dp_replicate, cp and ep",
    ),
    ("exposed", "the time that computation waits for a transfer; the rest overlaps with computation"),
    ("exchanged", "blue line: mostly overlaps with computation; orange line: mostly exposed"),
    ("computes", "blue: the forward, green: the backward, to the scale of the longest row"),
    ("×4", "the sum of as many equal modules; hover over a number for details"),
)


def model_section(root: ModuleRow, times: str) -> Section:
    """``times``: a sentence on what they are estimated for."""
    rows = list(root.all())
    depth = 99 if len(rows) <= MOST_OPEN else 2
    longest = max((row.total.forward + row.total.backward for row in rows), default=0.0) or 1.0
    head = "".join(f"<span>{name}</span>" for name in COLUMNS)
    tree = f"<div class=tree><div class='row head'>{head}</div>{_row(root, depth, longest)}</div>"
    return Section(TITLE, f"<p class=muted>{html.escape(times)}</p>{tree}{facts(LEGEND, 'legend')}")


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
    how = "; ".join(weight.cuts) or "replicated"
    more = [] if spec.requires_grad else ["frozen"]
    more += [f"also {name}" for name in spec.aliases]
    note = f" <i>{html.escape(', '.join(more))}</i>" if more else ""
    why = html.escape("\n".join([f"{weight.name}: {shape}, {human_bytes(weight.bytes)} on a rank", *weight.reasons]))
    return f"<span title='{why}'><u>{html.escape(weight.name)}</u> {html.escape(how)}{note}</span>"


def _exchanged(axis: str, kind: str, x: Exchanged, cost: ModuleCost) -> str:
    ways = [f"{way}: {human_bytes(e.bytes)}" for (a, k, way), e in cost.exchanged.items() if (a, k) == (axis, kind)]
    hidden = 1 - x.exposed / x.seconds if x.seconds else 1.0
    late = f"{human_seconds(x.exposed)} exposed" if hidden < 0.995 else "overlapped"
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
    """Memory at the peak: a bar with a segment for each (cause, bytes), and the numbers below."""
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


LATE, IDLE, LARGE = 0.15, 0.1, 0.4  # of the step's time, of it without work, of the memory at the peak: worth a line
_FASTER = {
    "tp": "keep tp within a node, or use a smaller tp and more dp; larger batches overlap more",
    "dp": "use more examples per rank; with zero below 3 a step gathers once for all its microbatches",
    "ep": "token_dispatcher= by name, see autopar experts; keep ep within a node",
    "cp": "attention= by name, see autopar attention; cp pays off for long sequences only",
    "pp": "use more microbatches, so that transfers overlap with computation",
}


def advice(plan: Plan, cost: ModuleCost, step: StepEstimate, memory: Memory) -> list[tuple[str, str]]:
    """cost: of the whole model. memory: of the fullest rank."""
    rows = [*_late(cost, step), *_idle(plan, step), *_full(plan, memory)]
    parts = (text.removeprefix("plan: ").rpartition("; ") for text in repeated(plan))
    return [*((found, way_out) for found, _, way_out in parts), *rows]


def _late(cost: ModuleCost, step: StepEstimate) -> Iterator[tuple[str, str]]:
    """Exposed transfers, by axis."""
    axes: dict[str, float] = {}
    for (axis, _, _), x in cost.exchanged.items():
        name = axis.partition(",")[0].partition("%")[0].partition("/")[0]
        axes[name] = axes.get(name, 0.0) + x.exposed
    for axis, seconds in sorted(axes.items(), key=lambda item: -item[1]):
        if seconds > LATE * step.seconds:
            share = f"{min(seconds / step.seconds, 1):.0%} of the step"
            found = f"computation waits {human_seconds(seconds)} for transfers over {axis}, {share}"
            yield found, _FASTER.get(axis, "")


def _idle(plan: Plan, step: StepEstimate) -> Iterator[tuple[str, str]]:
    """The bubble of a pipeline."""
    idle = 1 - (step.computing + step.exposed + step.optimizer) / step.seconds if step.seconds else 0.0
    if plan.pipeline is not None and idle > IDLE:
        more = f"microbatches above {plan.options.microbatches}, or a schedule with a smaller bubble"
        found = f"the pipeline's bubble is {idle:.0%} of the step"
        yield found, f"{more}: autopar schedule --name all"


def _full(plan: Plan, memory: Memory) -> Iterator[tuple[str, str]]:
    options, dp = plan.options, plan.mesh.data_size
    kept = min(memory.saved, memory.peak - memory.steady)
    if kept > LARGE * memory.peak:
        found = f"{human_bytes(kept)} of {human_bytes(memory.peak)} are activations kept for the backward"
        yield (
            found,
            'activation_checkpoint="selective" or "full", or memory_limit="40GB", which recomputes what it must; '
            + (
                "more microbatches"
                if plan.mesh.size("tp") == 1 or options.sequence_parallel
                else "sequence_parallel=True"
            ),
        )
    states = memory.optimizer if not memory.states else 0
    if dp > 1 and not options.zero and states + memory.parameters > LARGE * memory.peak:
        found = f"{human_bytes(states + memory.parameters)} of {human_bytes(memory.peak)} are weights and states of the"
        yield f"{found} optimizer, replicated on {dp} ranks", "zero=1, which stores a shard on each; or zero=3"

"""A dump: a folder with the text of each level's graph, the diff to the one before, the plan, times and bytes.

AUTOPAR_DUMP=dump python train.py

dump/00-capture.txt  01-normalize.txt  01-normalize.diff ...  timings.txt  plan.txt  plan.json  derived_rules.json
     communication.txt  report.html       with pipeline stages: order.txt  trace.json
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch.distributed
from torch.fx import GraphModule

from autopar.cost.memory import memories
from autopar.cost.serving_step import with_sizes
from autopar.cost.stage_costs import step_timeline
from autopar.cost.traffic import communication, step_communication
from autopar.ir.graph import compressed, without_indices, without_numbers
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.ir.signature import ParameterSpec
from autopar.ir.traffic import Ledger, Traffic, add_ledgers
from autopar.plan import Plan
from autopar.report.chrome_trace import Event, Span, events_of, measured_events, transfers, write_trace
from autopar.report.graph_text import diff, format_graph
from autopar.report.html.attention_section import attention_sections
from autopar.report.html.expert_section import Load, Sent, expert_sections
from autopar.report.html.health_section import Rows, health_sections
from autopar.report.html.model_pages import model_sections
from autopar.report.html.page import Level, Page, Section, render, table
from autopar.report.html.schedule_picture import pipeline_section
from autopar.report.serving_summary import cache_table
from autopar.report.summary import part_rows
from autopar.report.tables import human_bytes
from autopar.rewrite.compilation import Compilation
from autopar.rules.derived import as_file, recorded_calls
from autopar.schedule.order import COMPUTE, PARAMETERS, Action, Order
from autopar.schedule.request import Costs
from autopar.schedule.simulate import Timeline, per_part, simulate
from autopar.steps.graphs import Compiled
from autopar.steps.of_rank import parts_of
from autopar.steps.packed import Packed

VARIABLE = "AUTOPAR_DUMP"
STEP_TOKENS = 64  # of the step of a served model whose communication is shown: as many requests that decode
# Graphs that run as they are, such as forward or part1.backward_input.
STEP_GRAPHS = re.compile(
    r"prologue|once|each|(part\d+\.)?(pre_pass\d+|forward|backward(_input|_weight|_reduce)?|gather|reduce|"
    r"packed|tables)"
)


def dumper_for(folder: str | Path | None, role: str = "") -> Dumper | None:
    """The dumper for a folder that the user or AUTOPAR_DUMP names, or None. Each role has a folder within it.

    A report in the folder is kept: further compiled steps of the process (other shapes, eval mode) go to step-1,
    step-2, ... within it.
    """
    root = _root(folder)
    if root is None:
        return None
    root = root / role
    count = _written.get(root, 0)
    _written[root] = count + 1
    return Dumper(root / f"step-{count}" if count else root)


_written: dict[Path, int] = {}


def _root(folder: str | Path | None) -> Path | None:
    named = folder or os.environ.get(VARIABLE)
    return Path(named) if named else None


def check_writable(folder: str | Path | None) -> None:
    """Check, before anything is compiled, that the folder of `dumper_for` can be written. Raises ValueError."""
    root = _root(folder)
    if root is not None and is_first_rank():
        with writing(root):
            root.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=root).close()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of the file system name the path and are ValueErrors."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"dump: needs a folder that can be written, found {path}: {error.strerror}; name another one"
        ) from error


def is_first_rank() -> bool:
    """Whether this process writes: all ranks compile the same graphs, so rank 0 alone does."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


@dataclass
class Dumper:
    """An observer of the pass manager that writes every graph into ``folder``; see the module.

    Pass graphs that no pass has made to `record`, and call `finish` once at the end.
    """

    folder: Path
    title: str = "autopar"
    sections: list[Section] = field(default_factory=list)
    model: list[Section] = field(default_factory=list, init=False)
    facts: list[tuple[str, str]] = field(default_factory=list, init=False)
    levels: list[Level] = field(default_factory=list, init=False)
    _volumes: dict[str, Ledger] = field(default_factory=dict, init=False)
    _steps: list[str] = field(default_factory=list, init=False)
    _ranks: dict[str, Ledger] = field(default_factory=dict, init=False)
    _last: tuple[str, GraphModule | None] = field(default=("", None), init=False)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        self.enabled = is_first_rank()
        if self.enabled:
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                for old in (*self.folder.glob("[0-9][0-9]*-*.txt"), *self.folder.glob("[0-9][0-9]*-*.diff")):
                    old.unlink()  # a shorter run must not leave graphs of a longer one

    def __call__(self, name: str, gm: GraphModule, ctx: Compilation) -> None:
        """The graph after pass ``name``; the step graphs under their own names, as they run."""
        seconds = ctx.timings.get(name.rpartition(".")[2], 0.0)
        step = STEP_GRAPHS.fullmatch(name) is not None
        prefix, graph = self._last
        anew = prefix != ctx.prefix or (bool(prefix) and graph is not gm)  # another step graph, not the next level
        self._last = ctx.prefix, gm
        self.record(name, gm, ctx.mesh, seconds=seconds, step=step, anew=anew)
        if self.enabled and name == "derive_rules" and (entries := recorded_calls(gm)):
            self._write("derived_rules.json", as_file(entries))

    def record(
        self, name: str, gm: GraphModule, mesh: Mesh, *, seconds: float = 0.0, step: bool = False, anew: bool = False
    ) -> None:
        """Write one graph, and its diff to the graph recorded before.

        ``step`` says that the graph runs as it is (F, B of a stage): it has no diff, and its communication is what a
        step does. ``anew``: the graph before is another one, so there is no diff.
        """
        if not self.enabled:
            return
        text = format_graph(gm, mesh)
        before = self.levels[-1].text if self.levels and not (step or anew) else ""
        stem = f"{len(self.levels):03d}-{_file_name(name)}"
        changes = diff(before, text) if before else ""
        level = Level(name, text, changes, seconds, len(gm.graph.nodes), f"{stem}.txt", before == text)
        self._write(f"{stem}.txt", text)
        if level.diff:
            self._write(f"{stem}.diff", level.diff)
        self.levels.append(level)
        self._volumes[name] = communication(gm, mesh)
        if step:
            self._steps.append(name)

    def add_pipeline(
        self, compiled: Compiled, recorded: Sequence[Recorded] = (), modules: Sequence[Sequence[Span]] = ()
    ) -> None:
        """The schedule of a compiled step: order.txt, trace.json, and a section of the report. Nothing for a model of
        one part that nobody has measured.

        recorded, modules: what every coordinate on pp measured in a step, see
        `autopar.report.dump.dump.dump_pipeline`.
        """
        if not self.enabled or (len(compiled.pipeline.parts) == 1 and not recorded):
            return
        self.sections += dump_pipeline(self.folder, compiled, recorded, modules)
        ranks = range(compiled.plan.mesh.size("pp"))
        self._ranks = {f"a step, pp {rank}": step_communication(compiled, rank) for rank in ranks}

    def add_model(self, compiled: Compiled) -> None:
        """Add the first sections of the report: modules, one layer, memory, step time."""
        if self.enabled:
            self.model, self.facts = model_sections(compiled)

    def add_compiled(
        self,
        compiled: Compiled,
        recorded: Sequence[Recorded] = (),
        modules: Sequence[Sequence[Span]] = (),
        summary: Iterable[tuple[str, str]] = (),
        load: Load | None = None,
        sent: Sent | None = None,
        health: Rows = (),
    ) -> None:
        """Write everything about a compiled model, and `finish`. load, sent, health: measured expert load, traffic, and
        how ranks have spent their time."""
        self.add_model(compiled)
        self.sections += attention_sections(compiled) if self.enabled else []
        self.add_pipeline(compiled, recorded, modules)
        self.sections += expert_sections(compiled, load or {}, sent or {}) + health_sections(health)
        ctx = Compilation(compiled.plan.mesh, compiled.plan, timings=compiled.timings)
        self.finish(ctx, parameters=compiled.parameters, summary=summary)

    def add_packed(self, packed: Packed, summary: Iterable[tuple[str, str]] = ()) -> None:
        """Write everything about a model that is served, and `finish`. The communication is that of a step."""
        if not self.enabled:
            return
        for name in self._steps:
            del self._volumes[name]
        self._steps = []
        for k, stage in enumerate(packed.stages):
            name = f"{f'part{k}.' if len(packed.stages) > 1 else ''}packed, {STEP_TOKENS} tokens"
            self._volumes[name] = communication(with_sizes(packed, stage, STEP_TOKENS, STEP_TOKENS), packed.plan.mesh)
            self._steps.append(name)
        self.sections.append(
            Section("Cache of keys and values", table(*cache_table(packed), numeric=(1, 2, 3, 4, 5, 7)))
        )
        self.facts = [("a step", f"{STEP_TOKENS} requests that decode")]
        ctx = Compilation(packed.plan.mesh, packed.plan, timings=packed.timings)
        self.finish(ctx, parameters=packed.parameters, summary=summary)

    def finish(
        self, ctx: Compilation, *, parameters: Iterable[ParameterSpec] = (), summary: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Write timings, plan, communication and the report. ``summary`` rows come before the dumper's own."""
        if not self.enabled:
            return
        self._write("timings.txt", "".join(f"{s * 1e3:10.1f} ms  {name}\n" for name, s in ctx.timings.items()))
        if ctx.plan:
            self._write("plan.txt", f"{ctx.plan}\n")
            self._write("plan.json", ctx.plan.to_json() + "\n")
        rows = self.communication_rows()
        self._write("communication.txt", communication_text(rows))
        report = Page(
            title=self.title,
            summary=[*summary, *_summary(ctx, list(parameters)), *self.facts, *self._traffic()],
            model=self.model,
            plan=plan_rows(ctx.plan) if ctx.plan else [],
            timings=list(ctx.timings.items()),
            levels=self.levels,
            communication=rows,
            sections=self.sections,
        )
        self._write("report.html", render(report))

    def communication_rows(self) -> list[tuple[str, str, str, str, str]]:
        """(graph, axis, kind, calls, bytes) of the step graphs, or of the last graph when there are none yet; of a
        pipeline also of whole steps, by rank."""
        shown = {**self._ranks, **{name: self._volumes[name] for name in self._shown()}}
        return [
            (name, axis, kind, str(volume.calls), human_bytes(volume.bytes))
            for name, volumes in shown.items()
            for (axis, kind), volume in volumes.items()
        ]

    def _shown(self) -> list[str]:
        return self._steps or [level.name for level in self.levels[-1:]]

    def _traffic(self) -> list[tuple[str, str]]:
        if self._ranks:
            every = [sum(v.bytes for v in volumes.values()) for volumes in self._ranks.values()]
            return [("sent in a step", f"{human_bytes(max(every))} by the busiest rank")]
        sums = add_ledgers(*(self._volumes[name] for name in self._shown()))
        axes: dict[str, Traffic] = {}
        for (axis, _), volume in sums.items():
            name = re.split("[%/]", axis)[0]  # levels of an axis ("cp%2") count as the axis
            axes[name] = axes.get(name, Traffic()) + volume
        return [(f"sent over {axis}", f"{human_bytes(v.bytes)} in {v.calls} calls") for axis, v in axes.items()]

    def _write(self, name: str, text: str) -> None:
        with writing(self.folder / name):
            (self.folder / name).write_text(text, encoding="utf-8")


def _summary(ctx: Compilation, parameters: list[ParameterSpec]) -> list[tuple[str, str]]:
    mesh = ctx.plan.mesh if ctx.plan is not None else ctx.mesh  # without the microbatches
    rows = [("mesh", str(mesh)), ("ranks", str(mesh.world_size))]
    if parameters:
        whole = sum(p.nbytes() for p in parameters)
        stages = {rank for p in parameters for rank in p.ranks}
        mine = max(sum(p.nbytes(mesh) for p in parameters if rank in p.ranks) for rank in stages)
        most = " at most" if len(stages) > 1 else ""
        rows += [("parameters", f"{len(parameters)}, {human_bytes(whole)}")]
        rows += [("parameters per rank", f"{human_bytes(mine)}{most}")]
    return rows + [("compile time", f"{sum(ctx.timings.values()):.2f} s")]


def plan_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """(what, placement, reason) for each decision of a plan; equal decisions of repeated layers are one row."""
    rows = []
    for name, axes in plan.parameters.items():
        how = [f"{axis}:{p.stored}{f', used {p.used}' if p.used != p.stored else ''}" for axis, p in axes.items()]
        why = dict.fromkeys(f"{axis}: {p.reason}" for axis, p in axes.items() if p.reason)
        rows.append((name, "; ".join(how), "; ".join(why)))
    for name, placements in plan.inputs.items():
        rows.append((f"input {name}", " ".join(f"{axis}:{p}" for axis, p in placements.items()), ""))
    rows += [(f"stream from {s.node}", f"{s.axis}:{Shard(s.dim, s.blocks)}", s.reason) for s in plan.streams]
    rows += [
        (f"attention {node}", f"cp: {a.forward}, backward {a.backward}", a.reason) for node, a in plan.attention.items()
    ]
    rows += [(subject, "", reason) for subject, reason in plan.notes]
    groups: dict[tuple[str, str, str], list[tuple[str, str, str]]] = {}
    for row in rows:
        groups.setdefault((without_indices(row[0]), row[1], without_numbers(row[2])), []).append(row)
    return [(compressed([what for what, *_ in group]), *group[0][1:]) for group in groups.values()]


def communication_text(rows: Iterable[tuple[str, str, str, str, str]]) -> str:
    """The table as text: bytes that each rank sends, per graph, axis and kind."""
    head = ("graph", "axis", "kind", "calls", "bytes per rank")
    return "".join(f"{g:<28} {a:<6} {k:<16} {c:>6} {b:>16}\n" for g, a, k, c, b in (head, *rows))


def _file_name(title: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in title).strip("-")


UNIT = 1e-3  # seconds per unit of the pictures' times
Recorded = Sequence[tuple[Action, float, float]]


def dump_pipeline(
    folder: Path, compiled: Compiled, recorded: Sequence[Recorded] = (), modules: Sequence[Sequence[Span]] = ()
) -> list[Section]:
    """Write order.txt and trace.json, and make the sections of the report.

    recorded: for every coordinate on pp, (action, start, end) in seconds of one clock, as an executor that was made
    with ``record=True`` has them in ``timeline``; () for none. modules: (path, start, end) by the same clock, as it has
    them in ``modules``.
    """
    measured = measured_events(recorded, UNIT) or None
    timeline = step_timeline(compiled, UNIT)
    if measured:
        timeline = simulate(timeline.order, measured_costs(timeline.order, measured, timeline.costs))
    (folder / "order.txt").write_text(timeline.order.text() + "\n", encoding="utf-8")
    runs: dict[str, Iterable[Event]] = {"simulated": events_of(timeline)}
    if measured:
        runs["measured"] = measured
    within = {"measured": [[(path, s / UNIT, e / UNIT) for path, s, e in of_rank] for of_rank in modules]}
    write_trace(folder / "trace.json", runs, UNIT, within)
    return [_section(compiled, timeline, measured)]


def measured_costs(order: Order, events: Iterable[Event], costs: Costs) -> Costs:
    """``costs`` with the median of what was measured for every part; where B and W ran in one, B is all of it.

    comm is the least time between the end of an action and the start of what took its result on another rank.
    """
    events = [e for e in events if e[1].kind in (*COMPUTE, *PARAMETERS)]
    taken: dict[tuple[int, str], list[float]] = {}
    for _, action, start, end in events:
        taken.setdefault((order.part_of(action.stage), action.kind), []).append(
            (end - start) * (order.slices if action.kind in COMPUTE else 1)
        )

    def times(*kinds: str) -> tuple[float, ...]:
        found = [[taken.get((part, kind)) for kind in kinds] for part in range(order.parts)]
        return tuple(next((median(times) for times in of_part if times), 0.0) for of_part in found)

    gaps = [max(0.0, later[2] - one[3]) for one, later in transfers(events)]
    joined = [max(0.0, x - b) for x, b in zip(times("BWR"), times("BW", "BWR"), strict=True)]  # R inside of a backward
    return replace(
        costs, F=times("F"), B=times("B", "BW", "BWR"), W=times("W"), G=times("G"),
        R=tuple(map(max, times("R"), joined)), comm=min(gaps, default=0.0),
    )  # fmt: skip


# --- the report ----------------------------------------------------------------------------------------------


def _section(compiled: Compiled, timeline: Timeline, measured: Sequence[Event] | None) -> Section:
    estimated = f"estimated for {compiled.plan.options.target_hardware}"
    times = "simulated with the median times of the measured step" if measured else estimated
    notes = [f"Times are {times}; peak memory of activations in MiB."]
    notes += [reason for subject, reason in compiled.plan.notes if subject == "pipeline"]
    section = pipeline_section(
        replace(timeline, memory=tuple(value / 2**20 for value in timeline.memory)), measured, notes, "ms"
    )
    parts = f"<p class=muted>Parts, for one microbatch</p>{_parts(compiled, timeline)}"
    ranks = f"<p class=muted>Ranks of pp, for a step</p>{_ranks(compiled, timeline)}"
    return replace(section, body=f"{section.body}\n{parts}\n{ranks}")


def _parts(compiled: Compiled, timeline: Timeline) -> str:
    rows = []
    for row in part_rows(compiled, timeline):
        times = [f"{per_part(getattr(timeline.costs, kind), row['part']):.4g}" for kind in "FBW"]
        ranks = ", ".join(map(str, row["ranks"]))
        rows.append([str(row["part"]), ranks, *times, human_bytes(row["activations"]), row["modules"]])
    head = ("part", "on pp", "F, ms", "B, ms", "W, ms", "activations", "modules")
    return table(head, rows, numeric=(2, 3, 4, 5))


def _ranks(compiled: Compiled, timeline: Timeline) -> str:
    rows = []
    for rank, found in enumerate(memories(compiled)):
        sent = sum(v.bytes for v in step_communication(compiled, rank).values())
        sizes = (found.saved, found.parameters, found.optimizer, found.gathered, found.peak, sent)
        parts = ", ".join(map(str, parts_of(timeline.order, rank)))
        busy = f"{timeline.busy[rank]:.4g}"
        rows.append([str(rank), parts, busy, str(timeline.live[rank]), *map(human_bytes, sizes)])
    head = ("pp", "parts", "busy, ms", "live", "activations", "parameters", "optimizer", "gathered", "peak", "sent")
    return table(head, rows, numeric=tuple(range(2, 10)))

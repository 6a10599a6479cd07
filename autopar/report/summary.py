"""A plan as one object and as tables: decisions with reasons, bytes per rank, communication per step.

    model.layers.{0..31}.self_attn.q_proj.weight    32   [4096, 4096]   tp S(0)   column: by heads

Equal decisions of repeated layers are one row.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from autopar.ac_policies import LayerCheckpoint
from autopar.cost.hardware import Links
from autopar.cost.memory import Memory, memories, memory_at_worst
from autopar.cost.stage_costs import step_timeline
from autopar.cost.step_estimate import step_estimate
from autopar.cost.traffic import graph_runs, step_communication
from autopar.ir.graph import compressed, modules_of, without_indices, without_numbers
from autopar.ir.placement import Shard
from autopar.ir.signature import ParameterSpec
from autopar.ir.traffic import Ledger
from autopar.plan import Plan
from autopar.report.attention_summary import attention_summary, attention_table
from autopar.report.graph_text import DTYPES
from autopar.report.tables import escaped, fits, human_bytes, human_count, human_seconds, show_table, table_of
from autopar.schedule.formulas import of_equal_stages
from autopar.schedule.request import SCHEDULES
from autopar.schedule.simulate import Timeline, per_part
from autopar.steps.graphs import Compiled
from autopar.steps.of_rank import edge_bytes, parts_of

AXIS_SHARES = "What each axis shards of parameter bytes and forward FLOPs, and what is replicated"
CHECKPOINT_ROWS = "Activation checkpointing: values recomputed per layer, bytes kept and offloaded, time of all layers"
MEMORY_NOTES = {
    "parameters": "stored shards",
    "buffers": "buffers and constants",
    "inputs": "its shard of the batch of a step",
    "gradients": "one per parameter, with its placement and dtype",
    "optimizer": "AdamW: two moments, in the dtype of the parameters",
    "accumulated": "accumulated gradients of microbatches, before they are reduced",
    "saved": "activations that F keeps for B: of one microbatch, or of all in flight in a pipeline",
    "received": "of these, activations received from other stages",
    "gathered": "parameters that stay unsharded for all microbatches",
    "forward_peak": "live values in F, with saved activations and accumulated gradients",
    "backward_peak": "live values in B, with saved activations, gradients and accumulated gradients",
    "steady": "parameters + buffers + inputs + optimizer, without states in host memory",
    "peak": "steady + the greater peak",
    "peak_at_worst": "upper bound: peak if routing sends this rank every token that it can get",
    "host": "in host memory: activations",
    "states": "in host memory: optimizer states; three buckets of them are on the device at a time",
}
STEP_NAMES = {"seconds": "a step", "utilization": "MFU"}
STEP_NOTES = {
    "seconds": "with the optimizer step, without the overhead of the host",
    "computing": "of the rank that computes longest, with matrix products at half of the chip's peak",
    "moving": "transfers within its graphs, one after another",
    "exposed": "of these, the time that computation waits",
    "optimizer": "its step, on the rank with most elements of parameters",
    "utilization": "FLOPs of the model, without recomputation, relative to the peak of all chips",
}


def summarize(compiled: Compiled, model: str = "") -> dict[str, Any]:
    """A compiled plan as plain JSON values, which `show_summary` prints. Bytes are those of one rank; with pipeline
    stages, memory is that of the fullest rank, and communication that of the rank that sends most."""
    plan = compiled.plan
    links = Links.of(plan.options, plan.mesh)
    every, sent, worst = memories(compiled), volumes(compiled), memory_at_worst(compiled)
    fullest = max(every, key=lambda m: m.peak)
    busiest = max(sent, key=lambda v: sum(x.bytes for x in v.values()))
    found = {
        "model": model,
        "mesh": plan.mesh.sizes,
        "ranks": plan.mesh.world_size,
        "options": dataclasses.asdict(plan.options),
        "elements": sum(math.prod(p.shape) for p in compiled.parameters),
        "parameters": parameter_rows(plan, compiled.parameters),
        "inputs": {name: {axis: str(p) for axis, p in axes.items()} for name, axes in plan.inputs.items()},
        "streams": [
            {"node": s.node, "placement": f"{s.axis}:{Shard(s.dim, s.blocks, units=s.units)}", "reason": s.reason}
            for s in plan.streams
        ],
        "shares": [dataclasses.asdict(share) for share in plan.shares],
        "checkpoints": checkpoint_rows(plan),
        "notes": note_rows(plan),
        "step": dataclasses.asdict(step_estimate(compiled)),
        "memory": memory_row(fullest) | ({"peak_at_worst": worst.peak} if worst is not None else {}),
        "communication": [
            {
                "axis": key[0],
                "kind": key[1],
                "calls": v.calls,
                "bytes": v.bytes,
                "seconds": links.seconds(*key, v.bytes, v.calls),
            }
            for key, v in sorted(busiest.items())
        ],
        "runs": _runs(compiled),
        "seconds": {name: round(s, 3) for name, s in compiled.timings.items()},
    }
    if attention := attention_summary(compiled):
        found["attention"] = attention
    if plan.pipeline is not None:
        found["pipeline"] = pipeline_summary(compiled, [memory_row(m) for m in every], sent)
    return found


def volumes(compiled: Compiled) -> list[Ledger]:
    """`step_communication` of a rank for every coordinate on pp."""
    return [step_communication(compiled, rank) for rank in range(compiled.plan.mesh.size("pp"))]


def memory_row(found: Memory) -> dict[str, int]:
    """Memory as plain JSON values."""
    return {**dataclasses.asdict(found), "steady": found.steady, "peak": found.peak}


def _runs(compiled: Compiled) -> dict[str, dict[str, int]]:
    """Graph -> how often a rank that has it runs it in a step, and its number of nodes."""
    found: dict[str, dict[str, int]] = {}
    for rank in range(compiled.plan.mesh.size("pp")):
        for name, (gm, n) in graph_runs(compiled, rank).items():
            row = found.setdefault(name, {"times": 0, "nodes": 0})
            row["times"], row["nodes"] = max(row["times"], n), max(row["nodes"], len(gm.graph.nodes))
    return dict(sorted(found.items(), key=lambda item: item[0].startswith("part")))


# --- repeated layers are one row -----------------------------------------------------------------------------


def parameter_rows(plan: Plan, parameters: Iterable[ParameterSpec]) -> list[dict[str, Any]]:
    """Decisions per group of parameters whose names differ only in numbers, in the order of the model."""
    groups: dict[Any, list[ParameterSpec]] = {}
    for spec in parameters:
        decisions = plan.parameters.get(spec.name, {})
        same = tuple((a, p.stored, p.used, without_numbers(p.reason)) for a, p in decisions.items())
        groups.setdefault((without_indices(spec.name), spec.shape, spec.dtype, same), []).append(spec)
    rows = []
    for specs in groups.values():
        first = specs[0]
        axes = plan.parameters.get(first.name, {})
        rows.append(
            {
                "name": compressed([s.name for s in specs]),
                "aliases": list(first.aliases),
                "count": len(specs),
                "shape": list(first.shape),
                "dtype": DTYPES.get(first.dtype, str(first.dtype)),
                "bytes": sum(s.nbytes(plan.mesh) for s in specs),
                "axes": {
                    a: {"stored": str(p.stored), "used": str(p.used), "reason": p.reason} for a, p in axes.items()
                },
            }
        )
    return rows


def note_rows(plan: Plan) -> list[dict[str, str]]:
    """The notes of a plan; those of repeated layers are one row."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for subject, reason in plan.notes:
        groups.setdefault((without_indices(subject), without_numbers(reason)), []).append((subject, reason))
    return [{"subject": compressed([s for s, _ in g]), "reason": g[0][1]} for g in groups.values()]


def checkpoint_rows(plan: Plan) -> list[dict[str, Any]]:
    """What the backward recomputes; equal layers are one row."""
    groups: dict[Any, list[LayerCheckpoint]] = {}
    for layer in plan.checkpoints:
        key = layer.part, without_indices(layer.layer), len(layer.again), layer.saved, layer.hosted, layer.reason
        groups.setdefault(key, []).append(layer)
    return [
        {
            "part": part,
            "layers": compressed([layer.layer for layer in alike]),
            "again": again,
            "saved": saved,
            "hosted": hosted,
            "seconds": sum(layer.seconds for layer in alike),
            "reason": reason,
        }
        for (part, _, again, saved, hosted, reason), alike in groups.items()
    ]


# --- tables --------------------------------------------------------------------------------------------------


def show_summary(summary: dict[str, Any], console: Console) -> None:
    """Print a summary as tables."""
    mesh = ",".join(f"{axis}={size}" for axis, size in summary["mesh"].items())
    options = ", ".join(
        f"{k}={v}" for k, v in summary["options"].items() if k in ("zero", "sequence_parallel", "microbatches")
    )
    console.print(f"{summary['model']} on {mesh} ({summary['ranks']} ranks), {options}", highlight=False)
    more = [attention_table(summary["attention"])] if "attention" in summary else []
    more += [make(summary["pipeline"]) for make in (_facts, _parts, _ranks)] if "pipeline" in summary else []
    for table in (
        _placements(summary),
        _shares(summary),
        _checkpoints(summary),
        _others(summary),
        *more,
        _memory(summary),
        _communication(summary),
        _step(summary),
    ):
        if table.row_count:
            show_table(console, table)


def _checkpoints(summary: dict[str, Any]) -> Table:
    table = table_of(
        CHECKPOINT_ROWS, "part", "layers", "values", "kept", "host", "time", "why",
        right=("values", "kept", "host", "time"),
    )  # fmt: skip
    for row in summary["checkpoints"]:
        sizes = (human_bytes(row[name]) for name in ("saved", "hosted"))
        cells = str(row["again"]), *sizes, human_seconds(row["seconds"])
        table.add_row(str(row["part"]), escaped(row["layers"]), *cells, escaped(row["reason"]))
    return table


def _placements(summary: dict[str, Any]) -> Table:
    axes = list(dict.fromkeys(axis for row in summary["parameters"] for axis in row["axes"] if axis != "mb"))
    title = "Parameters (bytes of a rank, all stages together)" if "pipeline" in summary else "Parameters"
    table = table_of(title, "parameter", "shape", *axes, "bytes", "why", right=("bytes",))
    for row in summary["parameters"]:
        also = f" = {', '.join(row['aliases'])}" if row["aliases"] and row["count"] == 1 else ""
        found = {a: row["axes"][a] for a in axes if a in row["axes"]}
        why = "; ".join(f"{a}: {p['reason']}" for a, p in found.items() if p["reason"])
        placed = [_placement(found[a]) if a in found else "I" for a in axes]
        shape = f"{row['dtype']}{row['shape']}".replace(" ", "")
        table.add_row(escaped(row["name"] + also), escaped(shape), *placed, human_bytes(row["bytes"]), escaped(why))
    return table


def _placement(decision: dict[str, str]) -> str:
    """'S(0)', or 'S(0), used R'"""
    stored, used = decision["stored"], decision["used"]
    return stored if used == stored else f"{stored}, used {used}"


def _shares(summary: dict[str, Any]) -> Table:
    table = table_of(AXIS_SHARES, "axis", "of", "share", "sharded, or what is replicated", "why", right=("share",))
    for row in summary["shares"]:
        for kind in ("parameters", "FLOPs"):
            share = row["parameters" if kind == "parameters" else "flops"]
            if share is None:
                continue
            table.add_row(row["axis"], kind, f"{share:.1%}", "sharded", "")
            for part in (part for part in row["whole"] if part["kind"] == kind):
                table.add_row("", "", f"{part['share']:.1%}", escaped(part["subject"]), escaped(part["reason"]))
    return table


def _others(summary: dict[str, Any]) -> Table:
    table = table_of("Inputs, streams, notes", "what", "placement", "why")
    for name, axes in summary["inputs"].items():
        table.add_row(f"input {name}", " ".join(f"{a}:{p}" for a, p in axes.items()) or "replicated", "")
    for stream in summary["streams"]:
        table.add_row(f"stream {stream['node']}", stream["placement"], escaped(stream["reason"]))
    for attention in summary.get("attention", ()):
        names = dict.fromkeys(row["algorithm"] for row in attention["passes"])
        table.add_row(
            escaped(f"attention {attention['modules']}"), f"cp: {'+'.join(names)}", escaped(attention["reason"])
        )
    for note in summary["notes"]:
        if note["subject"] == "pipeline" and "pipeline" in summary:
            continue  # in its own table
        table.add_row(escaped(note["subject"]), "", escaped(note["reason"]))
    return table


def _memory(summary: dict[str, Any]) -> Table:
    whose = f"the fullest rank, {summary['pipeline']['fullest']} of pp" if "pipeline" in summary else "a rank"
    table = table_of(f"Memory of {whose}", "what", "bytes", "counted", right=("bytes",))
    for name, note in MEMORY_NOTES.items():
        size = summary["memory"].get(name, 0)
        if size or name not in ("accumulated", "received", "gathered", "host", "states", "peak_at_worst"):
            table.add_row(name.replace("_", " "), human_bytes(size), note)
    return table


def _communication(summary: dict[str, Any]) -> Table:
    title = "Communication of a rank per step (bytes sent, ring algorithms; time by estimate)"
    if "pipeline" in summary:
        title = f"Communication per step, rank {summary['pipeline']['busiest']} of pp"
    table = table_of(title, "axis", "kind", "calls", "bytes", "time", right=("calls", "bytes", "time"))
    for row in summary["communication"]:
        numbers = str(row["calls"]), human_bytes(row["bytes"]), human_seconds(row["seconds"])
        table.add_row(_axis(row["axis"]), row["kind"], *numbers)
    return table


def _step(summary: dict[str, Any]) -> Table:
    found = summary["step"]
    table = table_of(
        f"A step, estimated for {found['device']}, links {found['links']}", "what", "value", "", right=("value",)
    )
    for name, note in STEP_NOTES.items():
        value = f"{found[name]:.1%}" if name == "utilization" else human_seconds(found[name])
        table.add_row(STEP_NAMES.get(name, name), value, note)
    return table


def _axis(name: str) -> str:
    """A level of an axis in words: 'cp%2' -> 'cp, 2 neighbours', 'cp/2' -> 'cp, ranks 2 apart'. Several axes in one
    group, such as 'dp,ep', are unchanged."""
    axis, level, count = re.fullmatch(r"([\w,]+)([%/]?)(\d*)", name).groups()  # type: ignore[union-attr]
    return {"%": f"{axis}, {count} neighbours", "/": f"{axis}, ranks {count} apart"}.get(level, axis)


# --- pipelines -----------------------------------------------------------------------------------------


def pipeline_summary(
    compiled: Compiled, memories: Sequence[Mapping[str, int]], volumes: Sequence[Ledger]
) -> dict[str, Any]:
    """Plain JSON values. memories, volumes: of a rank for every coordinate on pp.

    Times are seconds on the device that the options name; ``time`` of a part is its share of all compute. idle: of a
    rank; idle_if_equal: by the schedule's ``formula``, if all stages took the same time (None: it has none).
    """
    pipeline, plan = compiled.pipeline, compiled.plan.pipeline
    assert plan is not None
    timeline = step_timeline(compiled)
    order, formula = pipeline.order, SCHEDULES[plan.schedule].bubble
    sent = [sum(v.bytes for v in volume.values()) for volume in volumes]
    peaks = [memory["peak"] for memory in memories]
    return {
        "schedule": plan.schedule,
        "target_hardware": compiled.plan.options.target_hardware,
        "why": [reason for subject, reason in compiled.plan.notes if subject == "pipeline"],
        "virtual_stages": plan.virtual_stages,
        "token_slices": list(plan.token_slices),
        "microbatches": order.microbatches,
        "parts": part_rows(compiled, timeline),
        "makespan": timeline.makespan,
        "step": timeline.cost,
        "bubble": timeline.bubble,
        "idle": timeline.bubble * timeline.cost,
        "formula": formula,
        "idle_if_equal": of_equal_stages(formula, timeline) if formula else None,
        "fullest": peaks.index(max(peaks)),
        "busiest": sent.index(max(sent)),
        "ranks": [
            {
                "rank": rank,
                "parts": parts_of(order, rank),
                "busy": timeline.busy[rank],
                "idle": timeline.idle[rank],
                "live": timeline.live[rank],
                "sent": sent[rank],
                **memory,
            }
            for rank, memory in enumerate(memories)
        ],
    }


def part_rows(compiled: Compiled, timeline: Timeline) -> list[dict[str, Any]]:
    """What each part of the model is, on which ranks it runs, and what one microbatch takes there. parameters: their
    number. activations: kept from F until B. sent: values for later parts."""
    pipeline, plan = compiled.pipeline, compiled.plan.pipeline  # (no plan: one part)
    order, costs = timeline.order, timeline.costs
    specs = {p.name: p for p in compiled.parameters}
    times = [sum(per_part(getattr(costs, kind), k) for kind in "FBW") for k in range(order.parts)]
    rows = []
    for k, part in enumerate(pipeline.parts):
        rows.append(
            {
                "part": k,
                "ranks": sorted({order.rank_of[chain[k]] for chain in order.chains}),
                "begins": plan.split_points[k - 1] if plan and k else "",
                "modules": modules_of(name for name in specs if name in part.parameters),
                "parameters": sum(math.prod(specs[name].shape) for name in part.parameters),
                "time": times[k] / (sum(times) or 1.0),
                "activations": round(per_part(costs.activations, k)),
                "sent": sum(edge_bytes(h, i) for h in pipeline.edges if h.source == k for i in range(len(h.shapes))),
            }
        )
    return rows


# --- tables --------------------------------------------------------------------------------------------------


def _facts(summary: Mapping[str, Any]) -> Table:
    table = table_of("Pipeline", "what", "value")
    table.add_row("schedule", summary["schedule"])
    for reason in summary["why"]:
        table.add_row("", escaped(reason))
    table.add_row("microbatches", str(summary["microbatches"]))
    if summary["token_slices"]:
        table.add_row("token slices", ", ".join(map(str, summary["token_slices"])))
    table.add_row(f"step, simulated for {summary['target_hardware']}", human_seconds(summary["step"]))
    table.add_row("bubble", f"{summary['bubble']:.1%}, {human_seconds(summary['idle'])}")
    if summary["formula"]:
        table.add_row("of equal stages", f"{summary['formula']} = {human_seconds(summary['idle_if_equal'])}")
    return table


def _parts(summary: Mapping[str, Any]) -> Table:
    right = ("parameters", "time", "activations", "sent")
    table = table_of("Parts (bytes of one microbatch)", "part", "on pp", "modules", *right, right=right)
    for row in summary["parts"]:
        ranks = ", ".join(map(str, row["ranks"]))
        sizes = [human_bytes(row[name]) for name in ("activations", "sent")]
        modules = escaped(row["modules"]) or row["begins"]
        table.add_row(str(row["part"]), ranks, modules, human_count(row["parameters"]), f"{row['time']:.1%}", *sizes)
    return table


def _ranks(summary: Mapping[str, Any]) -> Table:
    columns: tuple[str, ...] = (
        "busy",
        "idle",
        "live",
        "activations",
        "parameters",
        "optimizer",
        "gathered",
        "peak",
        "sent",
    )
    if not any(row["gathered"] for row in summary["ranks"]):
        columns = tuple(c for c in columns if c != "gathered")
    table = table_of("Ranks of pp, per step", "pp", "parts", *columns, right=columns)
    for row in summary["ranks"]:
        found = {name: human_bytes(row[name]) for name in columns if name in row}
        found |= {"activations": human_bytes(row["saved"]), "live": str(row["live"])}
        found |= {name: human_seconds(row[name]) for name in ("busy", "idle")}
        table.add_row(str(row["rank"]), ", ".join(map(str, row["parts"])), *(found[name] for name in columns))
    return table


# --- several plans side by side ------------------------------------------------------------------------

_NUMBERS = ("ranks", "a step", "tokens/s", "MFU", "exposed", "bubble", "memory", "of it weights", "optimizer", "sent")


def show_side_by_side(summaries: Sequence[Mapping[str, Any]], examples: int, tokens: int, console: Console) -> None:
    """Print a row per mesh, the fastest marked. summaries: of `autopar.report.summary.summarize`, each with its "mesh";
    one with "refused" instead says why there is none. examples, tokens: of the whole batch, of an example."""
    title = f"{summaries[0]['model']}: {examples} examples of {tokens} tokens in a step, on each mesh"
    rows = {_mesh(s): _numbers(s, examples * tokens) for s in summaries if "refused" not in s}
    seconds = {_mesh(s): s["step"]["seconds"] for s in summaries if "refused" not in s}
    fastest = min(seconds, key=seconds.__getitem__, default="")
    table = table_of(title, "", "mesh", *_NUMBERS, right=_NUMBERS)
    for mesh, numbers in rows.items():
        table.add_row("fastest" if mesh == fastest else "", mesh, *numbers)
    if not fits(console, table):  # a column for each mesh
        table = table_of(title, "", *rows, right=tuple(rows))
        table.add_row("", *("fastest" if mesh == fastest else "" for mesh in rows))
        for i, name in enumerate(_NUMBERS):
            table.add_row(name, *(numbers[i] for numbers in rows.values()))
    if rows:
        show_table(console, table)
    for summary in summaries:
        if "refused" in summary:
            console.print(f"{_mesh(summary)}: {escaped(summary['refused'])}")


def _mesh(summary: Mapping[str, Any]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in summary["mesh"].items())


def _numbers(summary: Mapping[str, Any], tokens: int) -> list[str]:
    step, memory = summary["step"], summary["memory"]
    sent = sum(row["bytes"] for row in summary["communication"])
    bubble = f"{summary['pipeline']['bubble']:.1%}" if "pipeline" in summary else ""
    return [
        str(summary["ranks"]),
        human_seconds(step["seconds"]),
        human_count(tokens / step["seconds"]),
        f"{step['utilization']:.1%}",
        human_seconds(step["exposed"]),
        bubble,
        human_bytes(memory["peak"]),
        human_bytes(memory["parameters"]),
        human_bytes(memory["optimizer"]),
        human_bytes(sent),
    ]

"""What a plan comes to, as one object and as tables: decisions with reasons, bytes per rank, communication per step.

    model.layers.{0..31}.self_attn.q_proj.weight    32   [4096, 4096]   tp S(0)   heads kept whole

Decisions of repeated layers that are the same but for the layer's number are one row.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from autopar.cost import runs, step_communication
from autopar.memory import memory
from autopar.parameter import ParameterSpec
from autopar.plan import Plan
from autopar.printing import DTYPES, human_bytes
from autopar.steps import Compiled

MEMORY_NOTES = {
    "parameters": "stored pieces",
    "buffers": "buffers and constants",
    "inputs": "its part of the batch of a step",
    "gradients": "one per parameter, placed and typed like it",
    "optimizer": "AdamW: two fp32 moments, and an fp32 master copy of half precision parameters",
    "accumulated": "gradient sums of micro-batches, before they are reduced",
    "saved": "activations that F of one micro-batch keeps for B",
    "forward_peak": "live values in F, saved ones and gradient sums included",
    "backward_peak": "live values in B, saved ones, gradients and gradient sums included",
    "steady": "parameters + buffers + inputs + optimizer",
    "peak": "steady + the greater peak",
}


def summarize(compiled: Compiled, model: str = "") -> dict[str, Any]:
    """Everything about a compiled plan as plain JSON values, which `show` prints. Bytes are those of one rank."""
    plan, found = compiled.plan, memory(compiled)
    return {
        "model": model,
        "mesh": plan.mesh.sizes,
        "ranks": plan.mesh.world_size,
        "options": dataclasses.asdict(plan.options),
        "elements": sum(math.prod(p.shape) for p in compiled.parameters),
        "parameters": parameter_rows(plan, compiled.parameters),
        "inputs": {name: {axis: str(p) for axis, p in axes.items()} for name, axes in plan.inputs.items()},
        "streams": [{"node": s.node, "dim": s.dim, "reason": s.reason} for s in plan.streams],
        "notes": note_rows(plan),
        "memory": {**dataclasses.asdict(found), "steady": found.steady, "peak": found.peak},
        "communication": [
            {"axis": axis, "kind": kind, "calls": v.calls, "bytes": v.bytes}
            for (axis, kind), v in sorted(step_communication(compiled).items())
        ],
        "runs": {name: {"times": n, "nodes": len(gm.graph.nodes)} for name, (gm, n) in runs(compiled).items()},
        "seconds": {name: round(s, 3) for name, s in compiled.timings.items()},
    }


# --- repeated layers are one row -----------------------------------------------------------------------------


def parameter_rows(plan: Plan, parameters: Iterable[ParameterSpec]) -> list[dict[str, Any]]:
    """Decisions per group of parameters that differ in numbers of their names only, in the order of the model."""
    groups: dict[Any, list[ParameterSpec]] = {}
    for spec in parameters:
        decisions = plan.parameters.get(spec.name, {})
        same = tuple((a, p.stored, p.used, _without_numbers(p.reason)) for a, p in decisions.items())
        groups.setdefault((_without_indices(spec.name), spec.shape, spec.dtype, same), []).append(spec)
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
    """What was left whole and why, repeated layers joined."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for subject, reason in plan.notes:
        groups.setdefault((_without_indices(subject), _without_numbers(reason)), []).append((subject, reason))
    return [{"subject": compressed([s for s, _ in g]), "reason": g[0][1]} for g in groups.values()]


def _without_indices(name: str) -> str:
    """model.layers.3.mlp -> model.layers.*.mlp"""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _without_numbers(reason: str) -> str:
    """Node names end in numbers, paths hold those of layers."""
    return re.sub(r"(?<=[_.])\d+\b", "*", reason)


def compressed(names: list[str]) -> str:
    """['a.0.w', 'a.1.w', 'a.2.w'] -> 'a.{0..2}.w'. All names have the same parts but for their indices."""
    columns = list(zip(*(name.split(".") for name in names), strict=True))
    shown, combinations = [], 1
    for column in columns:
        distinct = list(dict.fromkeys(column))
        combinations *= len(distinct)
        shown.append(distinct[0] if len(distinct) == 1 else f"{{{_ranges(sorted(map(int, distinct)))}}}")
    text = ".".join(shown)
    return text if combinations == len(names) else f"{text} ({len(names)} of {combinations})"


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0..2,5'"""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}..{r[-1]}" if len(r) > 2 else f"{r[0]},{r[1]}" for r in runs)


# --- tables --------------------------------------------------------------------------------------------------


def show(summary: dict[str, Any], console: Console) -> None:
    """Print a summary as tables."""
    mesh = ",".join(f"{axis}={size}" for axis, size in summary["mesh"].items())
    options = ", ".join(
        f"{k}={v}" for k, v in summary["options"].items() if k in ("zero", "sequence_parallel", "micro_batches")
    )
    console.print(f"{summary['model']} on {mesh} ({summary['ranks']} ranks), {options}", highlight=False)
    for table in (_placements(summary), _others(summary), _memory(summary), _communication(summary)):
        if table.row_count:
            console.print(table)


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _placements(summary: dict[str, Any]) -> Table:
    axes = list(dict.fromkeys(axis for row in summary["parameters"] for axis in row["axes"] if axis != "mb"))
    table = _table("Parameters", "parameter", "shape", *axes, "bytes", "why", right=("bytes",))
    for row in summary["parameters"]:
        also = f" = {', '.join(row['aliases'])}" if row["aliases"] and row["count"] == 1 else ""
        found = {a: row["axes"][a] for a in axes if a in row["axes"]}
        why = "; ".join(f"{a}: {p['reason']}" for a, p in found.items() if p["reason"])
        placed = [_placement(found[a]) if a in found else "I" for a in axes]
        shape = f"{row['dtype']}{row['shape']}".replace(" ", "")
        table.add_row(_text(row["name"] + also), _text(shape), *placed, human_bytes(row["bytes"]), _text(why))
    return table


def _placement(decision: dict[str, str]) -> str:
    """'S(0)', or 'S(0), used R'"""
    stored, used = decision["stored"], decision["used"]
    return stored if used == stored else f"{stored}, used {used}"


def _others(summary: dict[str, Any]) -> Table:
    table = _table("Inputs, streams, notes", "what", "placement", "why")
    for name, axes in summary["inputs"].items():
        table.add_row(f"input {name}", " ".join(f"{a}:{p}" for a, p in axes.items()) or "whole", "")
    for stream in summary["streams"]:
        table.add_row(f"stream {stream['node']}", f"tp:S({stream['dim']})", _text(stream["reason"]))
    for note in summary["notes"]:
        table.add_row(_text(note["subject"]), "", _text(note["reason"]))
    return table


def _memory(summary: dict[str, Any]) -> Table:
    table = _table("Memory of a rank", "what", "bytes", "counted", right=("bytes",))
    for name, note in MEMORY_NOTES.items():
        if summary["memory"][name] or name != "accumulated":
            table.add_row(name.replace("_", " "), human_bytes(summary["memory"][name]), note)
    return table


def _communication(summary: dict[str, Any]) -> Table:
    title = "Communication of a rank per step (bytes sent, ring algorithms)"
    table = _table(title, "axis", "kind", "calls", "bytes", right=("calls", "bytes"))
    for row in summary["communication"]:
        table.add_row(row["axis"], row["kind"], str(row["calls"]), human_bytes(row["bytes"]))
    return table


def _text(text: str) -> str:
    """Brackets are no markup."""
    return text.replace("[", "\\[")

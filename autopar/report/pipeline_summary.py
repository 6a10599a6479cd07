"""What the plan of a pipeline comes to: its parts, the simulated step, and what every rank holds and sends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from autopar.cost.step_timeline import step_timeline
from autopar.cost.traffic import Volume
from autopar.ir.layer_names import modules_of
from autopar.report.formatting import human_bytes, human_count, human_seconds
from autopar.report.tables import escaped, table_of
from autopar.schedule.simulate import Timeline, per_part
from autopar.steps.graphs import Compiled
from autopar.steps.of_rank import hop_bytes, parts_of

Volumes = Mapping[tuple[str, str], Volume]


def pipeline_summary(
    compiled: Compiled, memories: Sequence[Mapping[str, int]], volumes: Sequence[Volumes]
) -> dict[str, Any]:
    """Plain JSON values. memories, volumes: of a rank for every coordinate on pp.

    Times are seconds on the device that the options name; ``time`` of a part is its share of all compute.
    """
    pipeline, plan = compiled.pipeline, compiled.plan.pipeline
    assert plan is not None
    timeline = step_timeline(compiled)
    order = pipeline.order
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
    pipeline, plan = compiled.pipeline, compiled.plan.pipeline
    assert plan is not None
    order, costs = timeline.order, timeline.costs
    specs = {p.name: p for p in compiled.parameters}
    times = [sum(per_part(getattr(costs, kind), k) for kind in "FBW") for k in range(order.parts)]
    rows = []
    for k, part in enumerate(pipeline.parts):
        rows.append(
            {
                "part": k,
                "ranks": sorted({order.rank_of[chain[k]] for chain in order.chains}),
                "begins": plan.split_points[k - 1] if k else "",
                "modules": modules_of(name for name in specs if name in part.parameters),
                "parameters": sum(math.prod(specs[name].shape) for name in part.parameters),
                "time": times[k] / (sum(times) or 1.0),
                "activations": round(per_part(costs.activations, k)),
                "sent": sum(hop_bytes(h, i) for h in pipeline.hops if h.source == k for i in range(len(h.shapes))),
            }
        )
    return rows


# --- tables --------------------------------------------------------------------------------------------------


def pipeline_tables(summary: Mapping[str, Any]) -> list[Table]:
    """The summary as tables."""
    return [_facts(summary), _parts(summary), _ranks(summary)]


def _facts(summary: Mapping[str, Any]) -> Table:
    table = table_of("Pipeline", "what", "value")
    table.add_row("schedule", summary["schedule"])
    for reason in summary["why"]:
        table.add_row("", escaped(reason))
    table.add_row("microbatches", str(summary["microbatches"]))
    if summary["token_slices"]:
        table.add_row("token slices", ", ".join(map(str, summary["token_slices"])))
    table.add_row(f"step, simulated for {summary['target_hardware']}", human_seconds(summary["step"]))
    table.add_row("bubble", f"{summary['bubble']:.1%}")
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

"""Attention over sharded sequences in the summary of a plan: its table, and the JSON values behind it.

    attention                       count   layout   pass       algorithm     sends         steps   time
    model.layers.{0..31}.self_attn     32   zigzag   forward    token_ring    down 12 MiB       3   1.2 ms

Attentions that are the same problem and run the same way are one entry. Bytes and times are those of one call on the
rank that sends most, or is last; times are estimates (`autopar.planner.attention_choice`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.table import Table

from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.layouts import LAYOUTS, Blocks
from autopar.attention.problem import Problem
from autopar.cost.attention_costs import PASSES, AttentionCost, estimate, is_context_attention, problem_of_node
from autopar.cost.hardware import Device, Links, device_of
from autopar.cost.topology import Topology
from autopar.ir.graph import compressed, has_gradient, module_path, without_indices
from autopar.plan import AttentionPlan
from autopar.planner.context_parallel import AXIS
from autopar.report.tables import escaped, human_bytes, human_seconds, table_of
from autopar.steps.graphs import Compiled


@dataclass(frozen=True)
class Attention:
    """Equal attentions of a model. where: their modules. plan: that of the first. passes: those that the compiled step
    runs."""

    where: tuple[str, ...]
    problem: Problem
    plan: AttentionPlan
    passes: tuple[str, ...]
    topology: Topology
    device: Device

    @cached_property
    def chosen(self) -> list[AttentionCost]:
        """The cost of each pass."""
        return [self._estimate(getattr(self.plan, way), way) for way in self.passes]

    @cached_property
    def candidates(self) -> list[AttentionCost]:
        """The candidates that the plan considered."""
        return [self._estimate(name, way) for name, way, _ in self.plan.candidates if way in self.passes]

    def _estimate(self, algorithm: str, way: str) -> AttentionCost:
        return estimate(ALGORITHMS[algorithm], self.problem, way, self.topology, self.device)

    @property
    def modules(self) -> str:
        """'model.layers.{0..3}.self_attn'"""
        groups: dict[str, dict[str, None]] = {}
        for name in self.where:
            groups.setdefault(without_indices(name), {})[name] = None
        return ", ".join(compressed(list(names)) for names in groups.values())

    @property
    def layout(self) -> str:
        """'zigzag', or, if queries and keys differ, 'contiguous, zigzag'."""
        p = self.problem
        return ", ".join(dict.fromkeys(map(_layout, (p.query_blocks, p.key_blocks))))

    @property
    def what(self) -> str:
        """'64 queries, 64 keys, causal, 2 heads, 1 of keys, over 4 ranks'"""
        p = self.problem
        kinds = [name for name in ("segments", "key_mask", "sinks", "bias", "softcap", "dropout") if getattr(p, name)]
        masks = ["causal"] * p.mask.causal + [
            f"{n} {size}" for n in ("window", "chunk") if (size := getattr(p.mask, n))
        ]
        if p.documents:
            kinds[kinds.index("segments")] = f"{len(p.documents)} documents"
        sizes = [f"{p.queries} queries", f"{p.keys} keys", *masks, *(kind.replace("_", " ") for kind in kinds)]
        return ", ".join([*sizes, f"{p.heads} heads, {p.kv_heads} of keys", f"over {p.size} ranks"])


def _layout(blocks: Blocks) -> str:
    return next((name for name, known in LAYOUTS.items() if known == blocks), str(blocks))


def attentions_of(compiled: Compiled) -> list[Attention]:
    """The distinct attentions over cp of a compiled model, in the order of the graph; none without such an axis."""
    plan, found = compiled.plan, dict[Any, list[str]]()
    for node in compiled.local.graph.nodes:
        if is_context_attention(node):
            same = problem_of_node(node), plan.attention[node.name], compiled.train and has_gradient(node)
            found.setdefault(same, []).append(module_path(node) or node.name)
    topology, device = Links.of(plan.options, plan.mesh).axis(AXIS).topology, device_of(plan.options)
    return [
        Attention(tuple(where), problem, how, PASSES if trained else PASSES[:1], topology, device)
        for (problem, how, trained), where in found.items()
    ]


# --- the summary -----------------------------------------------------------------------------------------


def attention_summary(compiled: Compiled) -> list[dict[str, Any]]:
    """Plain JSON values, an entry for each distinct attention. sent: bytes by way ("up", "down", "home") or kind of
    collective. A candidate that cannot run it has a ``refusal``."""
    return [
        {
            "modules": a.modules,
            "count": len(a.where),
            "what": a.what,
            "layout": a.layout,
            "reason": a.plan.reason,
            "passes": [plain_cost(c) for c in a.chosen],
            "candidates": [plain_cost(c) for c in a.candidates],
        }
        for a in attentions_of(compiled)
    ]


def plain_cost(c: AttentionCost) -> dict[str, Any]:
    """The cost of one algorithm, as plain JSON values."""
    found: dict[str, Any] = {"pass": c.direction, "algorithm": c.algorithm}
    if c.refusal:
        return {**found, "refusal": c.refusal}
    return {**found, "sent": dict(c.sent), "steps": c.steps, "seconds": c.seconds, "exposed": c.exposed}


def attention_table(entries: Iterable[Mapping[str, Any]]) -> Table:
    """The summary's entries, a row for each pass."""
    right = ("count", "steps", "time", "exposed")
    columns = ("attention", "count", "layout", "pass", "algorithm", "sends", "steps", "time", "exposed")
    shown = table_of("Attention over cp (bytes and times of one call, by estimate)", *columns, right=right)
    for entry in entries:
        names = [escaped(entry["modules"]), escaped(entry["what"])]
        for i, row in enumerate(entry["passes"]):
            first = [names[i], *([str(entry["count"]), entry["layout"]] if i == 0 else ["", ""])]
            shown.add_row(*first, *cells_of(row))
        shown.add_section()
    shown.caption = "all candidates, with costs or why not: --json, or --dump DIR"
    return shown


def cells_of(row: Mapping[str, Any]) -> list[str]:
    """The cells of one pass: pass, algorithm, sends, steps, time, exposed."""
    sent = ", ".join(f"{way} {human_bytes(size)}" for way, size in row["sent"].items())
    return [
        row["pass"],
        row["algorithm"],
        sent,
        str(row["steps"]),
        human_seconds(row["seconds"]),
        human_seconds(row["exposed"]),
    ]

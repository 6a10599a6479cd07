"""What a schedule comes to: numbers of one, all schedules side by side, and the part of the report that shows one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from autopar.schedule.order import Order
from autopar.schedule.request import SCHEDULES, Costs, Request
from autopar.schedule.simulate import Timeline, simulate


def summary(timeline: Timeline) -> dict[str, Any]:
    """Plain JSON values: makespan; bubble (idle share of a step: for equal stages 1 - m (F + B + W) / cost, Qi et al.
    2024); peak memory and order of each rank."""
    return {
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "peak": [round(value, 9) for value in timeline.memory],
        "order": [[str(action) for action in actions] for actions in timeline.order.ranks],
    }


def timeline_facts(timeline: Timeline, unit: str = "") -> list[tuple[str, str]]:
    """(what, value) for people."""
    unit = f" {unit}" if unit else ""
    rows = [("makespan", f"{timeline.makespan:,.6g}{unit}")]
    if timeline.cost < timeline.makespan * (1 - 1e-9):
        rows.append(("step (each rank from its own start)", f"{timeline.cost:,.6g}{unit}"))
    most = max(timeline.memory)
    rank = timeline.memory.index(most)
    return [*rows, ("bubble", f"{timeline.bubble:.2%}"), ("peak memory", f"{most:.4g} (rank {rank})")]


# --- schedules side by side ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One row of a comparison: a timeline, or why there is none."""

    name: str
    timeline: Timeline | None = None
    refusal: str = ""


def run_schedule(name: str, request: Request, costs: Costs) -> Timeline:
    """Make a schedule and simulate it.

    ``costs`` are of a rank's whole share of the model for one microbatch (parts are equal shares of it), so schedules
    with more parts per rank compare. Raises ValueError for unknown names, and for what a schedule cannot do.
    """
    entry = SCHEDULES[name]
    assert isinstance(costs.activations, (int, float))
    each = costs.divided(max(request.virtual_stages, 1))
    order = entry.make(replace(request, costs=each))
    assert order.parts == request.ranks * request.virtual_stages, f"{name}: {order.parts} parts"
    timeline = simulate(order, each)
    if request.memory_limit is not None:
        _check_memory(timeline, request.memory_limit * costs.activations)
    return timeline


def _check_memory(timeline: Timeline, limit: float) -> None:
    most = max(timeline.memory)
    if most > limit * (1 + 1e-9):
        raise ValueError(
            f"schedule: {timeline.order.name} needs a memory limit of {most:.4g} (rank {timeline.memory.index(most)}), "
            f"found {limit:.4g}; take one that holds less, such as 1f1b, or seq1f1b with token slices"
        )


def compare(request: Request, costs: Costs, chunks: int | None = None) -> list[Outcome]:
    """Every schedule on the same work, with its own number of parts per rank unless ``chunks`` is given."""
    out = []
    for name, entry in SCHEDULES.items():
        try:
            asked = replace(request, virtual_stages=chunks or entry.virtual_stages)
            out.append(Outcome(name, run_schedule(name, asked, costs)))
        except ValueError as error:
            out.append(Outcome(name, refusal=" ".join(str(error).split())))
    return out


def sent(order: Order) -> int:
    """Activations that go from rank to rank in a step; as many gradients come back."""
    hops = [
        sum(order.rank_of[a] != order.rank_of[b] for a, b in pairwise(chain)) * order.chain_of.count(i)
        for i, chain in enumerate(order.chains)
    ]
    return sum(hops) * order.slices

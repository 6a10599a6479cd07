"""The schedule when the user names none: the fastest of those that need no more memory than 1F1B."""

from __future__ import annotations

from collections.abc import Mapping

import autopar.runtime.schedules  # noqa: F401  (fills the table of schedules)
from autopar.schedule.request import SCHEDULES, Costs, Request
from autopar.schedule.simulate import Timeline, simulate

NEARLY = 1.01


def chosen(ranks: int, microbatches: int, costs: Mapping[int, Costs]) -> tuple[str, str]:
    """(name in SCHEDULES, reason): simulate the candidates and take the shortest step; within 1 % the first in the
    table, which has simple ones first.

    costs: parts per rank -> the costs of those parts, such as {1: costs, 2: costs.divided(2)}. 1 must be there; a
    number that is absent is not possible.
    """
    assert 1 in costs, "1f1b has one part per rank"
    runs = {
        name: _run(name, ranks, microbatches, costs[entry.virtual_stages])
        for name, entry in SCHEDULES.items()
        if entry.candidate and entry.virtual_stages in costs
    }
    limit = max(runs["1f1b"].memory)
    fit = {name: run for name, run in runs.items() if max(run.memory) <= limit * (1 + 1e-9)}
    best = min(run.makespan for run in fit.values())
    name = next(name for name, run in fit.items() if run.makespan <= best * NEARLY)
    return name, _reason(name, runs, list(fit))


def _run(name: str, ranks: int, microbatches: int, costs: Costs) -> Timeline:
    schedule = SCHEDULES[name]
    return simulate(schedule.make(Request(ranks, microbatches, schedule.virtual_stages)), costs)


def _reason(name: str, runs: Mapping[str, Timeline], fit: list[str]) -> str:
    """One sentence with the numbers of all candidates."""
    others = [f"{other} {runs[other].makespan:.4g}" for other in fit if other != name]
    text = f"{name} takes {runs[name].makespan:.4g} per step by simulation"
    if others:
        text += f", {', '.join(others)}"
        if any(runs[other].makespan < runs[name].makespan for other in fit):
            text += " (within 1 % the simpler one is taken)"
    large = [f"{other} {max(run.memory):.4g}" for other, run in runs.items() if other not in fit]
    if large:
        text += f"; more memory than 1f1b's {max(runs['1f1b'].memory):.4g} need {', '.join(large)}"
    return text

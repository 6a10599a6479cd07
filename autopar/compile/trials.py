"""The best of several ways to compile a step, of which some may not fit a memory limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from autopar.ac_policies import AUTO
from autopar.compile.ac_solver import LimitError, has_drafts, within_limit
from autopar.plan import Plan
from autopar.rewrite.compilation import Compilation
from autopar.steps.graphs import Compiled

Way = TypeVar("Way")


def recompute_seconds(made: Compiled) -> float:
    """The time spent on recomputation and copies."""
    return sum(layer.seconds for layer in made.plan.checkpoints)


@dataclass(frozen=True)
class Fit(Generic[Way]):
    """A way that fits, what it was compiled to, and its cost. draft: compiled as one, for its memory alone."""

    way: Way
    made: Compiled
    cost: float
    draft: bool


def best_of(
    ctx: Compilation,
    ways: Sequence[Way],
    tried: Callable[[Way], Compiled],
    cost: Callable[[Compiled], float] = recompute_seconds,
    kept: Callable[[Plan, Plan], Plan] = lambda plan, _: plan,
) -> Compiled:
    """The first way that costs nothing, or the one that costs least. Observers see that one alone. Under a limit all
    ways but the first are compared as drafts. ``kept``: the plan that the next way begins with, given that of one that
    fits.

    Raises the LimitError with the least limit that would do, where no way fits."""
    if len(ways) == 1:
        return tried(ways[0])
    start = ctx.plan
    assert start is not None
    fits, errors = _compared(ctx, start, ways, tried, cost, kept)
    if fits:
        return _finished(ctx, start, min(fits, key=lambda fit: fit.cost), tried)
    errors.sort(key=lambda pair: pair[0].least)
    if ctx.alternatives:
        raise errors[0][0]
    return _first_that_fits(ctx, start, [way for _, way in errors], tried)


def _compared(
    ctx: Compilation,
    start: Plan,
    ways: Sequence[Way],
    tried: Callable[[Way], Compiled],
    cost: Callable[[Compiled], float],
    kept: Callable[[Plan, Plan], Plan],
) -> tuple[list[Fit[Way]], list[tuple[LimitError, Way]]]:
    """Every way until one costs nothing, without observers. A way that costs more than one before it is given up."""
    under_limit, drafts = start.options.ac_policy == AUTO, has_drafts(start)
    fits: list[Fit[Way]] = []
    errors: list[tuple[LimitError, Way]] = []
    with ctx.unobserved():
        for way in ways:
            ctx.plan = kept(start, fits[-1].made.plan) if fits else start
            draft, bound = ctx.draft or (way != ways[0] and drafts), min([ctx.bound, *(fit.cost for fit in fits)])
            try:
                with ctx.having(draft=draft, alternatives=True, bound=bound if under_limit else math.inf):
                    made = tried(way)
            except LimitError as error:
                errors.append((error, way))
                continue
            fits.append(Fit(way, made, cost(made), draft))
            if not fits[-1].cost:
                break
    return fits, errors


def _finished(ctx: Compilation, start: Plan, best: Fit[Way], tried: Callable[[Way], Compiled]) -> Compiled:
    """A way that fits, compiled to run and for observers: by the plan of its draft, or anew if that does not fit."""
    ctx.plan = best.made.plan
    if ctx.draft or not (ctx.observers or best.draft):
        return best.made
    made = tried(best.way)
    if start.options.ac_policy != AUTO or within_limit(made):
        return made
    ctx.plan = start
    return tried(best.way)


def _first_that_fits(ctx: Compilation, start: Plan, ways: Sequence[Way], tried: Callable[[Way], Compiled]) -> Compiled:
    """One of the ways, each of which looks as far as the least limit that it needs."""
    errors: list[LimitError] = []
    for way in ways:
        ctx.plan = start
        try:
            return tried(way)
        except LimitError as error:
            errors.append(error)
    raise min(errors, key=lambda error: error.least)

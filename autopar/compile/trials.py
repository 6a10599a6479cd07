"""The best of several ways to compile a step, of which some may not fit a memory limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from autopar.ac_policies import AUTO
from autopar.compile.ac_solver import LimitError, has_drafts, within_limit
from autopar.plan import Plan
from autopar.rewrite.compilation import Compilation
from autopar.steps.graphs import Compiled

Way = TypeVar("Way")


def recompute_seconds(made: Compiled) -> float:
    """The time spent on recomputation and copies."""
    return sum(layer.seconds for layer in made.plan.checkpoints)


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
    under_limit, drafts = start.options.ac_policy == AUTO, has_drafts(start)
    found: list[tuple[Compiled, Way]] = []
    errors: list[tuple[LimitError, Way]] = []
    with ctx.unobserved() as watched:
        for way in ways:
            ctx.plan = kept(start, found[-1][0].plan) if found else start
            drafted = ctx.draft or (way != ways[0] and drafts)
            bound = min([ctx.bound, *(cost(made) for made, _ in found)])
            try:
                with ctx.having(draft=drafted, alternatives=True, bound=bound if under_limit else math.inf):
                    found.append((tried(way), way))
            except LimitError as error:
                errors.append((error, way))
            if found and not cost(found[-1][0]):
                break
    if not found:
        if ctx.alternatives:
            raise min((error for error, _ in errors), key=_least)
        return _first_that_fits(ctx, start, [way for _, way in sorted(errors, key=lambda pair: _least(pair[0]))], tried)
    best, way = min(found, key=lambda pair: cost(pair[0]))
    ctx.plan = best.plan
    if ctx.draft or not (watched or (way != ways[0] and drafts)):
        return best
    made = tried(way)
    if not under_limit or within_limit(made):
        return made
    ctx.plan = start
    return tried(way)


def _least(error: LimitError) -> int:
    return error.least


def _first_that_fits(ctx: Compilation, start: Plan, ways: Sequence[Way], tried: Callable[[Way], Compiled]) -> Compiled:
    """One of the ways, each of which looks as far as the least limit that it needs."""
    errors: list[LimitError] = []
    for way in ways:
        ctx.plan = start
        try:
            return tried(way)
        except LimitError as error:
            errors.append(error)
    raise min(errors, key=_least)

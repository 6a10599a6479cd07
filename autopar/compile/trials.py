"""The best of several ways to compile a step, of which some may not fit a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from autopar.ac_policies import AUTO
from autopar.compile.ac_solver import LimitError, within_limit
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
) -> Compiled:
    """The first way that costs nothing, or the one that costs least. Observers see that one alone. Under a limit all
    ways but the first are compared as drafts.

    Raises the LimitError with the least limit that would do, where no way fits."""
    if len(ways) == 1:
        return tried(ways[0])
    start = ctx.plan
    assert start is not None
    found: list[tuple[Compiled, Way]] = []
    errors: list[tuple[LimitError, Way]] = []
    with ctx.unobserved() as watched:
        for way in ways:
            ctx.plan, drafted = start, ctx.draft or (way != ways[0] and start.options.ac_policy == AUTO)
            try:
                with ctx.having(draft=drafted, alternatives=True):
                    found.append((tried(way), way))
            except LimitError as error:
                errors.append((error, way))
            if found and not cost(found[-1][0]):
                break
    if not found:
        error, way = min(errors, key=lambda pair: pair[0].least)
        if ctx.alternatives:
            raise error
        ctx.plan = start
        return tried(way)  # it looks for the least limit, and raises
    best, way = min(found, key=lambda pair: cost(pair[0]))
    ctx.plan = best.plan
    if ctx.draft or not (watched or (way != ways[0] and start.options.ac_policy == AUTO)):
        return best
    made = tried(way)
    if start.options.ac_policy != AUTO or within_limit(made):
        return made
    ctx.plan = start
    return tried(way)

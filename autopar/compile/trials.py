"""The best of several ways to compile a step, of which some may not fit a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from autopar.compile.ac_solver import LimitError
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
    """The first way that costs nothing, or the one that costs least. Observers see that one alone.

    Raises the LimitError with the least limit that would do, where no way fits."""
    if len(ways) == 1:
        return tried(ways[0])
    found: list[tuple[Compiled, Way]] = []
    errors: list[LimitError] = []
    with ctx.unobserved() as watched:
        for way in ways:
            try:
                found.append((tried(way), way))
            except LimitError as error:
                errors.append(error)
            if found and not cost(found[-1][0]):
                break
    if not found:
        raise min(errors, key=lambda error: error.least)
    best, way = min(found, key=lambda pair: cost(pair[0]))
    ctx.plan = best.plan
    return tried(way) if watched else best

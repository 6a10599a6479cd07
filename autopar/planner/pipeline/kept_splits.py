"""Where a pipeline is cut whose weights lie on their ranks already: the forward may have changed since.

A layer with which a part began may be gone, or others may stand there. A cut may move, a weight may not: it is used in
parts whose ranks hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from torch.fx import Node

from autopar.ir.graph import described_at
from autopar.ir.mesh import Mesh
from autopar.plan import PipelinePlan
from autopar.planner.pipeline.split_candidates import LEVELS, parts_by_node, resolve, units_at
from autopar.planner.pipeline.step_order import layout, owners_of


def kept_cuts(
    main: Sequence[Node], weights: Callable[[Node], Iterable[str]], pipeline: PipelinePlan, mesh: Mesh
) -> tuple[str, ...]:
    """The cuts of an earlier plan if they leave every weight in parts of its ranks; else the coarsest others that do.

    main: the main nodes of a graph, in order. weights: names of the parameters that one takes.
    Raises ValueError where there are no such cuts.
    """
    order, owners = layout(pipeline, mesh), owners_of(pipeline, mesh)
    ranks = [{order.rank_of[chain[k]] for chain in order.chains} for k in range(pipeline.parts)]
    parts = {name: {k for k, found in enumerate(ranks) if found <= {*held}} for name, held in owners.items()}
    anywhere = frozenset(range(pipeline.parts))
    allowed = {node: anywhere.intersection(*(parts.get(name, anywhere) for name in weights(node))) for node in main}
    with suppress(ValueError):
        part_of = parts_by_node(*resolve(main, pipeline.split_points))
        if all(part in allowed[node] for node, part in part_of.items()):
            return pipeline.split_points
    for level in LEVELS:
        units = units_at(main, level)
        found = _starts([anywhere.intersection(*(allowed[n] for n in unit.nodes)) for unit in units], pipeline.parts)
        if found:
            return tuple(units[i].name for i in found[1:])
    raise ValueError(_refusal(main, allowed, weights, owners))


def _starts(allowed: Sequence[Collection[int]], parts: int) -> list[int]:
    """The first unit of each part, as late as the others allow; none where they do not fit. ``allowed``: the parts that
    each unit may be in."""
    fits = [[False] * (parts + 1) for _ in range(len(allowed) + 1)]  # [i][k]: units from i on, where i is in part k
    fits[-1][parts - 1] = True
    for i in reversed(range(len(allowed))):
        for k in allowed[i]:
            fits[i][k] = fits[i + 1][k] or (i + 1 < len(allowed) and fits[i + 1][k + 1])
    if not fits[0][0]:
        return []
    starts = [0]
    for i in range(1, len(allowed)):
        if not fits[i][len(starts) - 1]:
            starts.append(i)
    return starts


def _refusal(
    main: Sequence[Node],
    allowed: Mapping[Node, Collection[int]],
    weights: Callable[[Node], Iterable[str]],
    owners: Mapping[str, Sequence[int]],
) -> str:
    part = 0
    for node in main:
        later = [k for k in allowed[node] if k >= part]
        if not later:
            held = " and ".join(f"{name} (rank {', '.join(map(str, owners[name]))})" for name in weights(node))
            return (
                f"pipeline: {described_at(node)} computes with {held}, which no part that can come here holds; the "
                "forward uses weights in another order than when parallelize dealt them over the axis pp: make such a "
                "change before it"
            )
        part = min(later)
    return (
        "pipeline: the forward has fewer layers than when parallelize placed its weights, and leaves a part without an "
        "operation; make such a change before parallelize"
    )

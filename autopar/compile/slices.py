"""Token slices: local graphs of four sample slices become one set of graphs for slices of any length.

stages of samples   --`merged`-->       one stage, whose graphs take a length and a start
edges of samples     --`sliced_edge`-->   one edge, with a shape per slice
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autopar.ir.mesh import TokenSlice
from autopar.passes.stage.slice_sizes import LENGTH, START, sample_slices, symbolic
from autopar.plan import Plan
from autopar.planner.pipeline.slice_lengths import slice_unit
from autopar.schedule.order import P2PEdge
from autopar.schedule.request import SCHEDULES
from autopar.steps.graphs import Cache, Stage, StepGraph

COMPUTE_GRAPHS = ("forward", "gather_forward", "backward", "backward_input", "backward_weight", "backward_reduce")


def samples_of(plan: Plan, train: bool) -> tuple[TokenSlice, ...]:
    """The slices for which local graphs are built; none where a step runs all tokens at once."""
    if not train or plan.pipeline is None or not SCHEDULES[plan.pipeline.schedule].sliced:
        return ()
    return sample_slices(sum(plan.pipeline.token_slices), slice_unit(plan.options, plan.mesh))


def merged(stages: Sequence[Stage], slices: Sequence[TokenSlice], caches: Sequence[Cache]) -> Stage:
    """The stage for every slice, from those of the sample slices. ``caches``: of all stages."""
    first, made = stages[0], dict[str, Any]()
    for name in COMPUTE_GRAPHS:
        steps = [getattr(s, name) for s in stages]
        if steps[0] is not None:
            assert all(s.inputs == steps[0].inputs and s.outputs == steps[0].outputs for s in steps)
            graph = symbolic([s.graph for s in steps], slices)
            made[name] = StepGraph(graph, [*steps[0].inputs, LENGTH, START], steps[0].outputs)
    own = [c for c in caches if c.past in first.forward.inputs]
    return replace(first, **made, caches=own)


def sliced_edge(edges: Sequence[P2PEdge], slices: Sequence[TokenSlice], lengths: Sequence[int]) -> P2PEdge:
    """The edge with one shape per slice: sizes are affine in the length, so two samples determine them."""
    (first,), (longer,), (later,) = (h.shapes for h in edges[:3])
    if later != first:
        raise ValueError(
            f"token_slices: {edges[0].value} goes from stage {edges[0].source} to stage {edges[0].target} and grows "
            "with the tokens before the slice; split the model elsewhere with split_points=[...]"
        )
    a, b = slices[0].length, slices[1].length

    def shape(length: int) -> tuple[int, ...]:
        return tuple(x + (y - x) * (length - a) // (b - a) for x, y in zip(first, longer, strict=True))

    return replace(edges[0], shapes=tuple(map(shape, lengths)))

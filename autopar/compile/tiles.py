"""Whether regions that compute every token by itself run in tiles, so that their inner values never exist for all tokens
at once. The options or the plan decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch.fx import GraphModule, Node

from autopar.compile.loss_chunks import Made
from autopar.ir.graph import copy_graph
from autopar.passes.stage.tile_regions import TileRegion, tile_regions
from autopar.passes.stage.tile_tokens import tile_tokens
from autopar.plan import Plan
from autopar.planner.pipeline.pipeline_plan import main_parts
from autopar.rewrite.compilation import Compilation
from autopar.steps.graphs import Compiled


def in_tiles(
    graphs: Sequence[Made], ctx: Compilation, train: bool, attempt: Callable[[Sequence[Made]], Compiled]
) -> Compiled:
    """What ``attempt`` compiles from the graphs, or from copies with tiles. Raises ValueError for a model without such a
    region, and what ``attempt`` raises."""
    plan = ctx.plan
    assert plan is not None
    count = (plan.tiles or plan.options.tiles or 1) if train else 1
    if count > 1 and len(graphs) > 1:
        raise ValueError(
            f"tiles: {count} tiles need whole microbatches, found token slices; use another schedule, or leave tiles out"
        )
    if count > 1 and not regions_of(graphs[0][0], plan):
        raise ValueError(
            f"tiles: nothing can run in {count} tiles: it needs a product with a weight of another such product (an "
            "MLP), with nothing in between that mixes tokens or exchanges them; leave tiles out"
        )
    ctx.plan = replace(plan, tiles=count if train else 0)
    return attempt(_tiled(graphs, count, plan))


def regions_of(gm: GraphModule, plan: Plan) -> list[TileRegion]:
    """The regions that may run in tiles."""
    part_of: dict[Node, int] = {}
    if plan.pipeline is not None:
        parts = main_parts(gm, plan.pipeline.split_points)
        part_of = {n: k for k, nodes in enumerate(parts) for n in nodes}
    return tile_regions(gm, part_of)


def _tiled(graphs: Sequence[Made], count: int, plan: Plan) -> Sequence[Made]:
    """Copies with tiles."""
    if count == 1:
        return graphs
    ((gm, caches),) = graphs
    gm = copy_graph(gm)
    for region in reversed(regions_of(gm, plan)):  # a region is given values of those before it
        tile_tokens(gm, region, count)
    return [(gm, caches)]

"""Whether regions that compute every token by itself run in tiles, so that their inner values never exist for all
tokens at once.

The options or the plan decide. Under a memory limit, if whole regions would need recomputation, both are compiled, and
what takes less time for recomputation and copies is used. The inner values of a tile are always computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch.fx import GraphModule, Node

from autopar.ac_policies import AUTO
from autopar.compile.loss_chunks import Made
from autopar.compile.trials import best_of
from autopar.ir.graph import copy_graph
from autopar.passes.stage.chunk_losses import heads
from autopar.passes.stage.tile_regions import TileRegion, tile_regions
from autopar.passes.stage.tile_tokens import tile_tokens
from autopar.plan import Plan
from autopar.planner.pipeline.pipeline_plan import main_parts
from autopar.rewrite.compilation import Compilation
from autopar.steps.graphs import Compiled

MOST, ROWS = 32, 1024  # tiles that a limit may ask for, and tokens that each then has at least
INNER = 1 / 2  # of the bytes that enter and leave a region: a tile's inner values beside them


def in_tiles(
    graphs: Sequence[Made], ctx: Compilation, train: bool, attempt: Callable[[Sequence[Made]], Compiled]
) -> Compiled:
    """What ``attempt`` compiles from the graphs, or from copies with tiles. Raises ValueError for a model without such
    a region, and what ``attempt`` raises."""
    plan = ctx.plan
    assert plan is not None
    count = plan.tiles or plan.options.tiles
    if not train:
        return attempt(graphs)
    if count == 1 or (not count and plan.options.ac_policy != AUTO):
        ctx.plan = replace(plan, tiles=1, notes=_noted(plan, (), 1))
        return attempt(graphs)
    regions = regions_of(graphs[0][0], plan) if len(graphs) == 1 else []
    if count > 1 and not regions:
        raise _refused(count, len(graphs) > 1, plan)

    def tried(tiles: int) -> Compiled:
        assert ctx.plan is not None
        ctx.plan = replace(ctx.plan, tiles=tiles, notes=_noted(plan, regions, tiles))
        return attempt(_tiled(graphs, tiles, plan))

    if count:
        return tried(count)
    return best_of(ctx, list(dict.fromkeys((1, _enough(regions)))), tried, kept=_as_chunked)


def _as_chunked(plan: Plan, before: Plan) -> Plan:
    """A plan with losses in the chunks of another one that fits: tiles change little of what they are worth."""
    return replace(plan, loss_chunks=before.loss_chunks, loss_gradients=before.loss_gradients)


def regions_of(gm: GraphModule, plan: Plan) -> list[TileRegion]:
    """The regions that may run in tiles. Without heads, where the loss is computed in chunks."""
    part_of: dict[Node, int] = {}
    if plan.pipeline is not None:
        parts = main_parts(gm, plan.pipeline.split_points)
        part_of = {n: k for k, nodes in enumerate(parts) for n in nodes}
    chunked = max(plan.loss_chunks, plan.options.loss_chunks) > 1 or plan.options.ac_policy == AUTO
    apart = {n for head in heads(gm) for n in (head.product, *head.between)} if chunked else ()
    return tile_regions(gm, part_of, apart)


def _noted(plan: Plan, regions: Sequence[TileRegion], count: int) -> tuple[tuple[str, str], ...]:
    """The notes of a plan, with one of what tiles save."""
    notes = tuple(note for note in plan.notes if note[0] != "tiles")
    if count == 1:
        return notes
    inner = max(region.inner_bytes for region in regions)
    saves = f"{math.ceil(inner / count):,} bytes of inner values at a time instead of {inner:,}"
    return *notes, ("tiles", f"{len(regions)} regions run in {count} tiles of tokens: {saves}")


def _refused(count: int, sliced: bool, plan: Plan) -> ValueError:
    if sliced:
        return ValueError(
            f"tiles: {count} tiles need whole microbatches, found token slices; use another schedule, or leave tiles "
            "out"
        )
    if not plan.options.precision.scales_by_token:
        return ValueError(
            f"tiles: {count} tiles need products whose scales are each token's own, found {plan.options.precision!r}; "
            "use scaling='row' or 'block' with wide_weight_gradient=True, or leave tiles out"
        )
    return ValueError(
        f"tiles: nothing can run in {count} tiles: it needs a product with a weight of another such product (an MLP), "
        "with nothing in between that mixes tokens or exchanges them; leave tiles out"
    )


def _enough(regions: Sequence[TileRegion]) -> int:
    """The tiles for which the inner values of each region are small beside what enters and leaves it."""
    counts = [
        min(region.tokens // ROWS, math.ceil(region.inner_bytes / (INNER * region.outer_bytes))) for region in regions
    ]
    return max(1, min(MOST, max(counts, default=1)))


def _tiled(graphs: Sequence[Made], count: int, plan: Plan) -> Sequence[Made]:
    """Copies with tiles."""
    if count == 1:
        return graphs
    ((gm, caches),) = graphs
    gm = copy_graph(gm)
    for region in reversed(regions_of(gm, plan)):  # a region is given values of those before it
        tile_tokens(gm, region, count)
    return [(gm, caches)]

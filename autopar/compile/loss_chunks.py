"""Whether losses are computed in chunks of tokens, so that the logits of all tokens never exist at once.

The options or the plan decide. Under a memory limit, if unchunked logits would need recomputation, both are compiled,
and the one that recomputes less is used. Else large logits are chunked where that takes no longer: where F can compute
the gradients of a chunk, so that no product runs twice, and a chunk has rows enough for its products to be as fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from torch.fx import GraphModule

from autopar.ac_policies import AUTO
from autopar.compile.trials import best_of, recompute_seconds
from autopar.ir.graph import copy_graph, nbytes
from autopar.passes.stage.chunk_losses import Head, chunk_losses, heads, pending_logits
from autopar.plan import Plan
from autopar.planner.pipeline.pipeline_plan import main_parts
from autopar.planner.pipeline.step_order import most_waiting, planned_order
from autopar.rewrite.compilation import Compilation
from autopar.steps.graphs import Cache, Compiled

Made = tuple[GraphModule, list[Cache]]
MOST = 64  # chunks
TIMES = 4  # times the bytes of a head's input: the default size of a chunk's logits
LARGE = 1 << 30  # bytes of a head's logits on a rank, from which on they are chunked without a limit, too
FREE, ROWS = 8, 1024  # chunks of these, and the rows that each has at least


def in_chunks(
    graphs: Sequence[Made], ctx: Compilation, train: bool, attempt: Callable[[Sequence[Made]], Compiled]
) -> Compiled:
    """What ``attempt`` compiles from the graphs, or from copies with chunks. Raises ValueError for a model without such
    a head, and what ``attempt`` raises."""
    plan = ctx.plan
    assert plan is not None
    count, options = plan.loss_chunks or plan.options.loss_chunks, plan.options
    found = heads(graphs[0][0]) if train and len(graphs) == 1 else []
    if found and plan.pipeline is not None:
        found = _in_one_part(found, graphs[0][0], plan.pipeline.split_points, count)
    if train and count > 1 and not found:
        raise (
            _refused_sums(*pending)
            if (pending := pending_logits(graphs[0][0]))
            else ValueError(
                f"loss_chunks: no loss can be computed in {count} chunks: it needs a loss of a product with a weight "
                "whose logits have no other use, and whole microbatches; leave loss_chunks out"
            )
        )
    several = max((_chunks_of(head) for head in found), default=1)
    if train and count > 1:
        ways = [(count, way) for way in ([plan.loss_gradients] if plan.loss_gradients else _makers(plan))]
    elif count == 1 or options.ac_policy != AUTO or several == 1:
        ways = [(int(train), "")]
    else:
        ways = [(1, ""), *((several, way) for way in _makers(plan))]
    losses = {head.loss.name for head in found}
    if not count and options.ac_policy != AUTO and (free := _free_chunks(found, plan)) > 1:
        return _best(graphs, ctx, [(free, "forward"), (1, "")], losses, attempt, _in_forward)
    return _best(graphs, ctx, ways if options.ac_policy == AUTO else ways[:1], losses, attempt)


def _in_one_part(found: Sequence[Head], gm: GraphModule, split_points: tuple[str, ...], count: int) -> list[Head]:
    """The heads that no stage begins within. Raises ValueError if chunks are asked for and there is no such head."""
    part = {n: k for k, nodes in enumerate(main_parts(gm, split_points)) for n in nodes}
    whole = [head for head in found if part[head.product] == part[head.loss]]
    if count > 1 and not whole:
        raise ValueError(
            f"loss_chunks: needs logits and their loss in one stage, found one that begins between them (split points "
            f"{', '.join(split_points)}); use fewer stages, name other split_points, or leave loss_chunks out"
        )
    return whole


def _refused_sums(classes: int, axis: str, size: int) -> ValueError:
    more = f"pad the vocabulary to {math.ceil(classes / size) * size} classes, or " if classes % size else ""
    return ValueError(
        f"loss_chunks: needs a head that is replicated or sharded on its classes, found one of {classes} classes whose "
        f"logits are partial on the axis {axis!r} of size {size}; {more}leave loss_chunks out"
    )


def _makers(plan: Plan) -> list[str]:
    """Which step graphs may compute the gradients of chunks, the fastest first: F if its B follows at once, so that
    there is one gradient of a head at a time."""
    if plan.pipeline is not None and most_waiting(planned_order(plan)) > 1:
        return ["backward"]
    return ["forward", "backward"]


def _best(
    graphs: Sequence[Made],
    ctx: Compilation,
    ways: Sequence[tuple[int, str]],
    losses: Collection[str],
    attempt: Callable[[Sequence[Made]], Compiled],
    cost: Callable[[Compiled], float] = recompute_seconds,
) -> Compiled:
    """The best way, with its name in the plan. cost: by default the seconds of recomputation."""

    def tried(way: tuple[int, str]) -> Compiled:
        assert ctx.plan is not None
        ctx.plan = replace(ctx.plan, loss_chunks=way[0], loss_gradients=way[1])
        return _as_made(attempt(_chunked(graphs, way[0], losses)))

    return best_of(ctx, ways, tried, cost)


def _free_chunks(found: Sequence[Head], plan: Plan) -> int:
    """How many chunks cost no time; 1 where a head's logits are small, or F cannot compute gradients."""
    large = [head.rows for head in found if head.rows * head.logit_bytes >= LARGE]
    return min(FREE, max(large) // ROWS) if large and "forward" in _makers(plan) else 1


def _in_forward(made: Compiled) -> float:
    """1 if chunks compute their logits twice."""
    return float(made.plan.loss_chunks > 1 and made.plan.loss_gradients != "forward")


def _as_made(made: Compiled) -> Compiled:
    """With the graph that does compute the gradients of chunks: F cannot for every loss."""
    if made.plan.loss_gradients == "forward":
        early = any("early" in n.meta for part in made.pipeline.parts for n in part.forward.unnamed.graph.nodes)
        made.plan = replace(made.plan, loss_gradients="forward" if early else "backward")
    return made


def _chunked(graphs: Sequence[Made], count: int, losses: Collection[str]) -> list[Made]:
    """Copies with these losses in so many chunks."""
    copies = [(copy_graph(gm), caches) for gm, caches in graphs]
    for head in heads(copies[0][0]) if count > 1 else ():
        if head.loss.name in losses:
            chunk_losses(copies[0][0], head, math.ceil(head.rows / count))
    return copies


def _chunks_of(head: Head) -> int:
    given = head.product.args[0]
    return min(MOST, head.rows, math.ceil(head.rows * head.logit_bytes / (TIMES * nbytes(given))))  # type: ignore[arg-type]

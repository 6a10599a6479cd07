"""Whether losses are computed in chunks of tokens, so that the logits of all tokens never exist at once.

As the options or the plan say; under a memory limit both ways are compiled where whole logits ask for checkpoints, and
the one is taken that makes less again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch.fx import GraphModule

from autopar.checkpoint_policies import AUTO
from autopar.compile.fit_memory import LimitError
from autopar.ir.graph import copy_graph, nbytes
from autopar.passes.chunk_losses import Head, chunk_losses, heads
from autopar.rewrite.compilation import Compilation
from autopar.steps.graphs import Cache, Compiled

Made = tuple[GraphModule, list[Cache]]
MOST = 64  # chunks
TIMES = 4  # what goes into a head: about so large are the logits of a chunk, if nobody says


def in_chunks(
    graphs: Sequence[Made], ctx: Compilation, train: bool, attempt: Callable[[Sequence[Made]], Compiled]
) -> Compiled:
    """What ``attempt`` compiles of the graphs, or of their like with chunks. Raises ValueError for chunks of a model
    that has no such head, and what ``attempt`` raises."""
    plan = ctx.plan
    assert plan is not None
    count, options = plan.loss_chunks or plan.options.loss_chunks, plan.options
    found = heads(graphs[0][0]) if train and len(graphs) == 1 else []
    if train and count > 1:
        if not found:
            raise ValueError(
                f"loss_chunks: no loss can be computed in {count} chunks: it takes one of a product with a weight, of "
                "whose logits nobody else takes any, and whole micro-batches; leave loss_chunks out"
            )
        ctx.plan = replace(plan, loss_chunks=count)
        return attempt(_chunked(graphs, count))
    several = max((_chunks_of(head) for head in found), default=1)
    if count == 1 or options.checkpoints != AUTO or several == 1:
        ctx.plan = replace(plan, loss_chunks=int(train))
        return attempt(graphs)
    return _better(graphs, ctx, several, attempt)


def _better(
    graphs: Sequence[Made], ctx: Compilation, several: int, attempt: Callable[[Sequence[Made]], Compiled]
) -> Compiled:
    plan = ctx.plan
    assert plan is not None
    found: list[Compiled] = []
    errors: list[LimitError] = []
    with ctx.unobserved() as watched:
        for count in (1, several):
            ctx.plan = replace(plan, loss_chunks=count)
            try:
                found.append(attempt(_chunked(graphs, count)))
            except LimitError as error:
                errors.append(error)
            if found and not found[0].plan.checkpoints:
                break
    if not found:
        raise min(errors, key=lambda error: error.least)
    best = min(found, key=lambda made: sum(layer.seconds for layer in made.plan.checkpoints))
    ctx.plan = best.plan
    return attempt(_chunked(graphs, best.plan.loss_chunks)) if watched else best


def _chunked(graphs: Sequence[Made], count: int) -> list[Made]:
    """Copies, with losses in so many chunks."""
    copies = [(copy_graph(gm), caches) for gm, caches in graphs]
    for head in heads(copies[0][0]) if count > 1 else ():
        chunk_losses(copies[0][0], head, math.ceil(head.rows / count))
    return copies


def _chunks_of(head: Head) -> int:
    given = head.product.args[0]
    return min(MOST, head.rows, math.ceil(head.rows * head.logit_bytes / (TIMES * nbytes(given))))  # type: ignore[arg-type]

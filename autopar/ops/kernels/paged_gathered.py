"""Attention to paged keys on any device: the pages of each request, copied into one tensor."""

from __future__ import annotations

import contextlib

from torch import Tensor

from autopar.ops import kernels
from autopar.ops.kernels.paged_kernel import Paged, PagedKernel, facts_of, flat, gathered, plan_of
from autopar.ops.kernels.paged_plan import Layout, Run, Segment


class Gathered(PagedKernel):
    """The keys of each request, copied from its pages into one tensor, and a kernel of `kernels.forward`. With
    ``split_kv=False`` that is ``math``, whose sums depend on a request's own shapes alone."""

    name = "gathered"

    def applies(self, q: Tensor, given: Paged) -> bool:
        return True

    def forward(self, q: Tensor, given: Paged) -> Tensor:
        _, heads, tokens, width = q.shape
        pages, page, value = *given.keys.shape[:2], given.values.shape[-1]
        layout = Layout(
            tokens, given.window, given.chunk, page, pages * page, False, False, 0, heads * (width + value), heads
        )
        known = plan_of(given, layout)
        out = q.new_zeros(1, tokens, heads, value).transpose(1, 2)
        for segment in known.plan.segments:
            out[:, :, segment.begin : segment.end] = self._one(q, given, segment)
        return out

    def _one(self, q: Tensor, given: Paged, segment: Segment) -> Tensor:
        keys, values = flat(given)
        pieces = segment.pieces
        runs = segment.gathered or [pieces[0]._replace(size=sum(piece.size for piece in pieces))]
        k, v = (gathered(x, runs).transpose(0, 1).unsqueeze(0) for x in (keys, values))
        every = Run(0, runs[0].first, k.shape[2])
        first = segment.first - every.first
        facts = facts_of(given, segment.begin, segment.end, every, True, given.window, first)
        with contextlib.nullcontext() if given.split_kv else kernels.using("math"):
            out, lse = kernels.forward(q[:, :, segment.begin : segment.end], k, v, facts)
        return kernels.with_sinks(out, lse, given.sinks)[0]

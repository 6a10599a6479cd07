"""Attention to paged keys on any device: the pages of a request, copied into one tensor if they are several runs."""

from __future__ import annotations

import contextlib

from torch import Tensor

from autopar.ops import kernels
from autopar.ops.kernels.paged_kernel import Paged, PagedKernel, attend_segment, plan_of
from autopar.ops.kernels.paged_plan import Layout


class Gathered(PagedKernel):
    """Request by request, with the kernels of `kernels.forward`; with ``split_kv=False`` with ``math``, whose sums
    depend on a request's own shapes alone."""

    name = "gathered"

    def applies(self, q: Tensor, given: Paged) -> bool:
        return True

    def forward(self, q: Tensor, given: Paged) -> Tensor:
        pages, page, _, value = given.values.shape
        layout = Layout(q.shape[2], given.window, given.chunk, page, pages * page, False, False, 0)
        known = plan_of(given, layout)
        out = q.new_zeros(1, q.shape[2], q.shape[1], value).transpose(1, 2)
        with contextlib.nullcontext() if given.split_kv else kernels.using("math"):
            for segment in known.plan.segments:
                out[:, :, segment.begin : segment.end] = attend_segment(q, segment, given, known)
        return out

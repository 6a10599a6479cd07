"""The interface of a kernel of `autopar::cached_attention`, and what several of them share: the plan of a step, which
all layers with the same tables use, and attention piece by piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from autopar.ops import kernels
from autopar.ops.kernels.kernel import NEVER, wide
from autopar.ops.kernels.paged_plan import Layout, Piece, Segment, StepPlan, plan_step
from autopar.ops.mask_spec import MaskSpec


class Paged(NamedTuple):
    """The arguments of `autopar::cached_attention` without the tokens' own keys and values, which are in the pools."""

    keys: Tensor
    values: Tensor
    table: Tensor
    starts: Tensor
    lengths: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    window: int
    chunk: int
    scale: float
    softcap: float
    split_kv: bool


class PagedKernel(ABC):
    """One way to attend to paged keys. name: the argument of `using`."""

    name: str

    @abstractmethod
    def applies(self, q: Tensor, given: Paged) -> bool:
        """Whether it supports this."""

    @abstractmethod
    def forward(self, q: Tensor, given: Paged) -> Tensor:
        """q [1, Hq, T, D] -> out [1, Hq, T, Dv] of q's dtype, stored as [1, T, Hq, Dv]."""


# --- plans of steps ------------------------------------------------------------------------

_KEPT = 16  # plans: of the kinds of windows and dtypes of a step, and of the steps in flight of a pipeline


class Known:
    """The plan of a step, and tensors that layers with the same tables share."""

    def __init__(self, given: Paged, layout: Layout) -> None:
        self.tensors = (given.table, given.starts, given.lengths)
        self.versions = tuple(map(_version, self.tensors))
        self.layout = layout
        table = given.table.cpu().numpy()
        self.plan: StepPlan = plan_step(table, given.starts.tolist(), given.lengths.tolist(), layout)
        self.masks: dict[tuple[int, torch.dtype], Tensor] = {}  # of calls, by their id
        self.orders: dict[int, tuple[Tensor, Tensor]] = {}  # of tokens in calls, likewise
        self.pages: dict[int, Tensor] = {}  # of pieces that are copied, by their id

    def is_of(self, given: Paged, layout: Layout) -> bool:
        table, starts, lengths = self.tensors
        same = table is given.table and starts is given.starts and lengths is given.lengths and layout == self.layout
        return same and self.versions == tuple(map(_version, self.tensors))


def _version(x: Tensor) -> int | bytes:
    """Changes when the tensor is written to: torch's count, or the content where torch does not count."""
    return x.cpu().numpy().tobytes() if x.is_inference() else x._version


_known: deque[Known] = deque(maxlen=_KEPT)


def plan_of(given: Paged, layout: Layout) -> Known:
    """The plan for these tables: one that is known, if they are the same tensors, unchanged."""
    for known in tuple(_known):  # another thread may add to it
        if known.is_of(given, layout):
            return known
    known = Known(given, layout)
    _known.appendleft(known)
    return known


# --- pieces ---------------------------------------------------------------------------


def taken(pool: Tensor, piece: Piece, known: Known) -> Tensor:
    """Keys or values of a piece of a pool, [size, Hk, width]: a view, if they are one run; else their pages are
    copied."""
    flat, page, slot = pool.view(-1, *pool.shape[2:]), pool.shape[1], piece.runs[0].slot
    if len(piece.runs) == 1:
        return flat[slot : slot + piece.size]
    pages = known.pages.get(id(piece))
    if pages is None:
        parts = [np.arange(run.slot // page, -(-(run.slot + run.size) // page)) for run in piece.runs]
        pages = known.pages[id(piece)] = torch.from_numpy(np.concatenate(parts)).to(pool.device)
    copied = pool.index_select(0, pages).view(-1, *pool.shape[2:])
    return copied[slot % page : slot % page + piece.size]


def attend_segment(q: Tensor, segment: Segment, given: Paged, known: Known) -> Tensor:
    """out [1, Hq, tokens, Dv] of a segment: the results of its pieces, merged by their log-sum-exps."""
    q = q[:, :, segment.begin : segment.end]
    whole: tuple[Tensor, Tensor] | None = None
    for piece in segment.pieces:
        k, v = (taken(x, piece, known).transpose(0, 1).unsqueeze(0) for x in (given.keys, given.values))
        part = kernels.forward(q, k, v, _facts(segment, piece, given))
        whole = part if whole is None else merged(*whole, *part)
    assert whole is not None
    return kernels.with_sinks(*whole, given.sinks)[0]


def _facts(segment: Segment, piece: Piece, given: Paged) -> MaskSpec:
    """The mask of a piece, without what it satisfies anyway, and without sinks."""
    last = segment.first + segment.end - segment.begin - 1
    causal = piece.first + piece.size - 1 > segment.first
    window = given.window if given.window and last - piece.first >= given.window else 0
    bias = given.bias
    if bias is not None:
        bias = bias[:, :, segment.begin : segment.end] if bias.shape[2] > 1 else bias
        bias = bias[..., piece.first : piece.first + piece.size]
    offset = segment.first - piece.first
    return MaskSpec(
        bias, None, None, None, None, causal, window, 0, offset, given.scale, given.softcap, 0.0, 0, (), (), ()
    )


def merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two results over different keys as the result over all of them, in the dtype of partial results."""
    whole = torch.logaddexp(lse, other_lse)
    finite = whole.masked_fill(whole == NEVER, 0.0)
    dtype = wide(out.dtype)
    weights = (torch.exp(x - finite).unsqueeze(-1) for x in (lse, other_lse))
    first, second = (x.to(dtype) * weight.to(dtype) for x, weight in zip((out, other), weights))
    return first + second, whole

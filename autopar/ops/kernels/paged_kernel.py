"""The interface of a kernel of `autopar::cached_attention`, and what several of them share: the plan of a step, which
all layers with the same tables use, and the views and masks of runs of pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.ops.kernels.paged_plan import Layout, Run, StepPlan, plan_step
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
        self.masks: dict[tuple[int, torch.dtype], Tensor] = {}  # of its calls

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


# --- runs of pages ---------------------------------------------------------------------------


def flat(given: Paged) -> list[Tensor]:
    """Keys [slots, Hk, D] and values [slots, Hk, Dv]."""
    return [x.view(-1, *x.shape[2:]) for x in (given.keys, given.values)]


def of_run(x: Tensor, run: Run) -> Tensor:
    """A view [size, Hk, width] of a flat pool."""
    return x[run.slot : run.slot + run.size]


def gathered(x: Tensor, runs: Sequence[Run]) -> Tensor:
    """Copies of runs, one after another: [keys, Hk, width]."""
    return torch.cat([of_run(x, run) for run in runs])


def facts_of(given: Paged, begin: int, end: int, piece: Run, causal: bool, window: int, offset: int) -> MaskSpec:
    """The mask of tokens [begin, end) at the keys of a piece, without sinks; ``offset``: of the first token from its
    first key."""
    bias = given.bias
    if bias is not None:
        bias = bias[:, :, begin:end] if bias.shape[2] > 1 else bias
        bias = bias[..., piece.first : piece.first + piece.size]
    return MaskSpec(bias, None, None, None, None, causal, window, 0, offset, given.scale, given.softcap, 0.0, 0, (), ())

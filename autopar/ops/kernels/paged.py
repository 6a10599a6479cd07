"""Kernels of `autopar::cached_attention`: a table from name to kernel; the first that applies is used.

rows        CPU: views of the pools, no copies of keys (`paged_plan`)
gathered    any device: the pages of each request, copied into one tensor

with paged.using("gathered"): ...      # tests and benchmarks: this one, or an error
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.ops import kernels
from autopar.ops.kernels.kernel import NEVER, wide
from autopar.ops.kernels.paged_plan import Call, Layout, Run, Segment, StepPlan, plan_step
from autopar.ops.mask_spec import MaskSpec
from autopar.registry import Registry

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BLOCK = 1024  # keys of a piece where a kernel's memory grows with them


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


PAGED: Registry[PagedKernel] = Registry("kernel of paged attention")  # in the order of preference

_forced: list[PagedKernel] = []


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Within: only this kernel. Raises ValueError for an unknown name, and where it does not apply."""
    _forced.append(PAGED[name])
    try:
        yield
    finally:
        _forced.pop()


def forward(q: Tensor, given: Paged) -> Tensor:
    """out of the first kernel that applies."""
    for kernel in _forced[-1:] or map(PAGED.__getitem__, PAGED):
        if kernel.applies(q, given):
            return kernel.forward(q, given)
    raise ValueError(
        f"cached_attention: kernel {_forced[-1].name!r} was asked for, but does not support q {list(q.shape)} of "
        f"{q.dtype} on {q.device.type} with these masks; leave the choice open or use 'gathered'"
    )


# --- plans of steps --------------------------------------------------------------------------------------------------

_KEPT = 16  # plans: of the kinds of windows and dtypes of a step, and of the steps in flight of a pipeline


class _Known:
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


_known: deque[_Known] = deque(maxlen=_KEPT)


def _plan(given: Paged, layout: Layout) -> _Known:
    for known in _known:
        if known.is_of(given, layout):
            return known
    known = _Known(given, layout)
    _known.appendleft(known)
    return known


# --- on CPUs ---------------------------------------------------------------------------------------------------------


class Rows(PagedKernel):
    """Views of the pools: torch's flash kernel for CPUs where it applies, else that of `kernels.forward`."""

    name = "rows"

    def applies(self, q: Tensor, given: Paged) -> bool:
        return q.device.type == "cpu"

    def forward(self, q: Tensor, given: Paged) -> Tensor:
        _, heads, tokens, width = q.shape
        pages, page, _, value = given.values.shape
        fused = not given.softcap and width == value
        layout = Layout(
            given.window, given.chunk, page, pages * page, given.split_kv, fused,
            0 if fused and given.bias is None else BLOCK, heads * (width + value), heads, given.bias is not None,
        )  # fmt: skip
        known = _plan(given, layout)
        plan = known.plan
        if plan.one_call and plan.calls[0].rows == tokens:
            out = _attend_rows(q, plan.calls[0], given, known).permute(2, 1, 0, 3)
            return out if out.stride(1) == value else out.transpose(1, 2).contiguous().transpose(1, 2)
        out = q.new_empty(1, tokens, heads, value).transpose(1, 2)
        for begin, end in plan.idle:
            out[:, :, begin:end] = 0
        for call in plan.calls:
            _put(out, _attend_rows(q, call, given, known), call)
        for segment in plan.segments:
            out[:, :, segment.begin : segment.end] = _attend_segment(q, segment, given)
        return out


def _put(out: Tensor, rows: Tensor, call: Call) -> None:
    """rows [rows, Hq, 1, Dv] into the places of their tokens."""
    rows = rows.permute(2, 1, 0, 3)
    if call.in_order:
        out[:, :, call.tokens[0] : call.tokens[0] + call.rows] = rows
        return
    own = [row for row, token in enumerate(call.tokens) if token >= 0]
    places = torch.tensor([call.tokens[row] for row in own])
    out.index_copy_(2, places, rows[:, :, own])


def _queries(q: Tensor, call: Call) -> Tensor:
    """q of the rows of a call [rows, Hq, 1, D]; rows without a token have that of the first."""
    if call.in_order:
        mine = q if call.rows == q.shape[2] else q[:, :, call.tokens[0] : call.tokens[0] + call.rows]
    else:
        mine = q.index_select(2, torch.tensor([max(token, 0) for token in call.tokens]))
    return mine.permute(2, 1, 0, 3)


def _attend_rows(q: Tensor, call: Call, given: Paged, known: _Known) -> Tensor:
    """out [rows, Hq, 1, Dv] of a call. Masked keys can be those of other requests: where one of them is not a finite
    number, it would reach the rows of all, so they are computed one by one."""
    queries = _queries(q, call)
    mask = _mask(q, call, given, known)
    k, v = _of_call(given.keys, call), _of_call(given.values, call)
    out, lse = _flash(queries, k, v, 0.0, False, attn_mask=mask, scale=given.scale)
    if call.masked and not math.isfinite(out.sum().item()):
        mask = mask if given.bias is not None else None
        rows = [(slice(i, i + 1), slice(size)) for i, size in enumerate(call.sizes)]
        each = (
            _flash(
                queries[i], k[i, :, size], v[i, :, size], 0.0, False, scale=given.scale,
                attn_mask=None if mask is None else mask[i, ..., size],
            )
            for i, size in rows
        )  # fmt: skip
        out, lse = map(torch.cat, zip(*each))
    return out if given.sinks is None else kernels.with_sinks(out, lse, given.sinks)[0]


def _of_call(x: Tensor, call: Call) -> Tensor:
    """A view [rows, Hk, keys, D] of a pool."""
    _, _, heads, width = x.shape
    key = heads * width
    strides = (call.distance * key, width, key, 1)
    return x.as_strided((call.rows, heads, call.keys, width), strides, x.storage_offset() + call.slot * key)


def _mask(q: Tensor, call: Call, given: Paged, known: _Known) -> Tensor | None:
    """[rows|1, Hq|1, 1, keys] or None, if every row sees all of its keys."""
    mask = None
    if call.masked:
        mask = known.masks.get((id(call), q.dtype))
        if mask is None:
            sizes = torch.tensor(call.sizes)[:, None, None, None]
            mask = q.new_zeros(call.rows, 1, 1, call.keys).masked_fill_(torch.arange(call.keys) >= sizes, NEVER)
            known.masks[id(call), q.dtype] = mask
    if given.bias is None:
        return mask
    bias = given.bias[0, ..., call.first : call.first + call.keys]  # [H|1, T|1, keys]
    if bias.shape[1] > 1:
        bias = bias[:, [max(token, 0) for token in call.tokens]]
    bias = bias.transpose(0, 1).unsqueeze(2).to(q.dtype)
    return bias if mask is None else bias + mask


def _attend_segment(q: Tensor, segment: Segment, given: Paged) -> Tensor:
    """out [1, Hq, tokens, Dv] of a segment: the results of its pieces, merged by their log-sum-exps."""
    q = q[:, :, segment.begin : segment.end]
    keys, values = _flat(given)
    if segment.gathered:
        keys, values = (torch.cat([_of_run(x, run) for run in segment.gathered]) for x in (keys, values))
    whole: tuple[Tensor, Tensor] | None = None
    for piece in segment.pieces:
        k, v = (_of_run(x, piece).transpose(0, 1).unsqueeze(0) for x in (keys, values))
        part = kernels.forward(q, k, v, _facts(segment, piece, given))
        whole = part if whole is None else merged(*whole, *part)
    assert whole is not None
    return kernels.with_sinks(*whole, given.sinks)[0]


def _flat(given: Paged) -> list[Tensor]:
    """Keys [slots, Hk, D] and values [slots, Hk, Dv]."""
    return [x.view(-1, *x.shape[2:]) for x in (given.keys, given.values)]


def _of_run(x: Tensor, run: Run) -> Tensor:
    return x[run.slot : run.slot + run.size]


def _facts(segment: Segment, piece: Run, given: Paged) -> MaskSpec:
    """The mask of a piece: only what it does not satisfy anyway."""
    last = segment.first + segment.end - segment.begin - 1
    causal = piece.first + piece.size - 1 > segment.first
    window = given.window if given.window and last - piece.first >= given.window else 0
    return _mask_spec(given, segment.begin, segment.end, piece, causal, window, segment.first - piece.first)


def _mask_spec(given: Paged, begin: int, end: int, piece: Run, causal: bool, window: int, offset: int) -> MaskSpec:
    bias = given.bias
    if bias is not None:
        bias = bias[:, :, begin:end] if bias.shape[2] > 1 else bias
        bias = bias[..., piece.first : piece.first + piece.size]
    return MaskSpec(bias, None, None, None, None, causal, window, 0, offset, given.scale, given.softcap, 0.0, 0, (), ())


def merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two results over different keys as the result over all of them, in the dtype of partial results."""
    whole = torch.logaddexp(lse, other_lse)
    finite = whole.masked_fill(whole == NEVER, 0.0)
    dtype = wide(out.dtype)
    weights = (torch.exp(x - finite).unsqueeze(-1) for x in (lse, other_lse))
    first, second = (x.to(dtype) * weight.to(dtype) for x, weight in zip((out, other), weights))
    return first + second, whole


# --- on any device -----------------------------------------------------------------------------------------------


class Gathered(PagedKernel):
    """The keys of each request, copied from its pages into one tensor, and a kernel of `kernels.forward`. With
    ``split_kv=False`` that is ``math``, whose sums depend on a request's own shapes alone."""

    name = "gathered"

    def applies(self, q: Tensor, given: Paged) -> bool:
        return True

    def forward(self, q: Tensor, given: Paged) -> Tensor:
        _, heads, tokens, width = q.shape
        pages, page, value = *given.keys.shape[:2], given.values.shape[-1]
        layout = Layout(given.window, given.chunk, page, pages * page, False, False, 0, heads * (width + value), heads)
        known = _plan(given, layout)
        out = q.new_zeros(1, tokens, heads, value).transpose(1, 2)
        for segment in known.plan.segments:
            out[:, :, segment.begin : segment.end] = self._one(q, given, segment)
        return out

    def _one(self, q: Tensor, given: Paged, segment: Segment) -> Tensor:
        keys, values = _flat(given)
        pieces = segment.pieces
        runs = segment.gathered or [pieces[0]._replace(size=sum(piece.size for piece in pieces))]
        k, v = (torch.cat([_of_run(x, run) for run in runs]).transpose(0, 1).unsqueeze(0) for x in (keys, values))
        every = Run(0, runs[0].first, k.shape[2])
        first = segment.first - every.first
        facts = _mask_spec(given, segment.begin, segment.end, every, True, given.window, first)
        with contextlib.nullcontext() if given.split_kv else kernels.using("math"):
            out, lse = kernels.forward(q[:, :, segment.begin : segment.end], k, v, facts)
        return kernels.with_sinks(out, lse, given.sinks)[0]


for _kernel in (Rows(), Gathered()):
    PAGED.add(_kernel.name, _kernel)

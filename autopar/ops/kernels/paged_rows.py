"""Attention to paged keys on CPUs, by views of the pools.

No key is copied where the pages of a request are one run. Where they are several, short ones are copied, at most a
block at a time; with ``split_kv=False`` all of them, so that the bits are those of one run.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.ops import kernels
from autopar.ops.kernels.kernel import NEVER
from autopar.ops.kernels.paged_kernel import Known, Paged, PagedKernel, attend_segment, plan_of, taken
from autopar.ops.kernels.paged_plan import BLOCK, Call, Layout

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
COPIED = 400_000  # bytes that are copied in the time in which one more piece is computed and merged


class Rows(PagedKernel):
    """Views of the pools: torch's flash kernel for CPUs where it applies, else that of `kernels.forward`."""

    name = "rows"

    def applies(self, q: Tensor, given: Paged) -> bool:
        return q.device.type == "cpu"

    def forward(self, q: Tensor, given: Paged) -> Tensor:
        _, heads, tokens, width = q.shape
        pages, page, _, value = given.values.shape
        fused = not given.softcap and width == value
        biased, of_key = given.bias is not None, given.keys.shape[2] * (width + value) * q.element_size()
        layout = Layout(
            tokens, given.window, given.chunk, page, pages * page, given.split_kv, fused,
            BLOCK if biased or not fused else 0, min(COPIED // of_key, BLOCK), heads * (width + value),
            given.keys.shape[2], biased,
        )  # fmt: skip
        known = plan_of(given, layout)
        plan, q = known.plan, q if q.stride(-1) == 1 else q.contiguous()  # the kernel assumes it
        if plan.one_call and plan.calls[0].rows == tokens:
            out = _attend_rows(q, plan.calls[0], given, known)
            return out if out.stride(1) == value else out.transpose(1, 2).contiguous().transpose(1, 2)
        out = q.new_empty(1, tokens, heads, value).transpose(1, 2)
        for begin, end in plan.idle:
            out[:, :, begin:end] = 0
        for call in plan.calls:
            _put(out, _attend_rows(q, call, given, known), call, known)
        for segment in plan.segments:
            out[:, :, segment.begin : segment.end] = attend_segment(q, segment, given, known)
        return out


def _order(call: Call, known: Known) -> tuple[Tensor, Tensor]:
    """(tokens of the rows, where rows without a token have that of another; the rows with a token of their own)."""
    if id(call) not in known.orders:
        own = [row for row, token in enumerate(call.tokens) if token >= 0]
        known.orders[id(call)] = torch.tensor([max(token, 0) for token in call.tokens]), torch.tensor(own)
    return known.orders[id(call)]


def _put(out: Tensor, rows: Tensor, call: Call, known: Known) -> None:
    """rows [1, Hq, rows, Dv] into the places of their tokens."""
    if call.in_order:
        out[:, :, call.tokens[0] : call.tokens[0] + call.rows] = rows
        return
    tokens, own = _order(call, known)
    if len(own) < call.rows:
        tokens, rows = tokens[own], rows.index_select(2, own)
    out.index_copy_(2, tokens, rows)


def _queries(q: Tensor, call: Call, known: Known) -> Tensor:
    """q of the rows of a call [1, Hq, rows, D]."""
    if not call.in_order:
        return q.index_select(2, _order(call, known)[0])
    return q if call.rows == q.shape[2] else q[:, :, call.tokens[0] : call.tokens[0] + call.rows]


def _attend_rows(q: Tensor, call: Call, given: Paged, known: Known) -> Tensor:
    """out [1, Hq, rows, Dv] of a call.

    The query heads of a key head are queries of one attention, which reads its keys once; unless that leaves threads
    without work. Masked keys can be those of other requests: where one of them is not a finite number, it would reach
    the rows of all, so they are computed one by one.
    """
    keys, values = given.keys, given.values
    if call.copied:
        keys, values = (taken(x, call.copied, known).unsqueeze(0) for x in (keys, values))
    k, v = _of_call(keys, call), _of_call(values, call)
    rows, heads, width = call.rows, q.shape[1], q.shape[3]
    units = k.shape[1] if rows * k.shape[1] >= torch.get_num_threads() else heads
    queries = _queries(q, call, known).view(units, heads // units, rows, width).permute(2, 0, 1, 3)
    mask = _mask(q, call, given, known)
    if mask is not None and mask.shape[1] > 1:
        mask = mask.view(-1, units, heads // units, call.keys)
    out, lse = _flash(queries, k, v, 0.0, False, attn_mask=mask, scale=given.scale)
    if call.masked and not math.isfinite(out.sum().item()):
        mask = mask if given.bias is not None else None
        slices = [(slice(i, i + 1), slice(*keys)) for i, keys in enumerate(call.visible)]
        each = (
            _flash(
                queries[i], k[i, :, keys], v[i, :, keys], 0.0, False, scale=given.scale,
                attn_mask=None if mask is None else mask[i, ..., keys],
            )
            for i, keys in slices
        )  # fmt: skip
        out, lse = map(torch.cat, zip(*each))
    out = out.permute(1, 2, 0, 3).reshape(1, heads, rows, -1)
    if given.sinks is None:
        return out
    return kernels.with_sinks(out, lse.permute(1, 2, 0).reshape(1, heads, rows), given.sinks)[0]


def _of_call(x: Tensor, call: Call) -> Tensor:
    """A view [rows, Hk, keys, D] of a pool."""
    _, _, heads, width = x.shape
    key = heads * width
    strides = (call.distance * key, width, key, 1)
    return x.as_strided((call.rows, heads, call.keys, width), strides, x.storage_offset() + call.slot * key)


def _mask(q: Tensor, call: Call, given: Paged, known: Known) -> Tensor | None:
    """[rows|1, Hq|1, 1, keys] or None, if every row sees all of its keys."""
    mask = None
    if call.masked:
        mask = known.masks.get((id(call), q.dtype))
        if mask is None:
            begin, end = (x[:, None, None, None] for x in torch.tensor(call.visible).unbind(1))
            at = torch.arange(call.keys)
            mask = q.new_zeros(call.rows, 1, 1, call.keys).masked_fill_((at < begin) | (at >= end), NEVER)
            known.masks[id(call), q.dtype] = mask
    if given.bias is None:
        return mask
    bias = given.bias[0, ..., call.first : call.first + call.keys]  # [H|1, T|1, keys]
    if bias.shape[1] > 1:
        bias = bias.index_select(1, _order(call, known)[0])
    bias = bias.transpose(0, 1).unsqueeze(2).to(q.dtype)
    return bias if mask is None else bias + mask

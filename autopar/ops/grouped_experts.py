"""Mixture of experts as four operators: sort the tokens by expert, multiply group by group, put them back.

    rows, order, offsets = moe_dispatch(x, expert, E)        # rows sorted by expert, each token K times
    hidden = grouped_bias(grouped_mm(rows, w_up, offsets), b_up, offsets)
    out = moe_combine(grouped_mm(act(hidden), w_down, offsets), order, weights)

Expert e owns rows offsets[e-1] .. offsets[e]. Rows behind the last offset (expert number >= E: tokens that belong to
nobody here) multiply to zero. An expert without tokens is fine. In the backward, the gradient to the rows and the
gradient to the weights are separate operators, so that they can be scheduled apart.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.ops.kernels.chips import chip_of
from autopar.ops.tiles import Tiles


@torch.library.custom_op(
    "autopar::moe_dispatch",
    mutates_args=(),
    schema="(Tensor x, Tensor expert, int num_experts) -> (Tensor rows, Tensor order, Tensor offsets)",
)
def moe_dispatch(x: Tensor, expert: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], expert [T, K] int -> rows [T*K, H] sorted by expert (stable), order [T*K] int64 with
    rows[i] = x[order[i] // K], offsets [E] int32, cumulative."""
    ranked, order = torch.sort(expert.reshape(-1), stable=True)
    return x.index_select(0, order // expert.shape[1]), order, _told(_ends(ranked, num_experts))


def _ends(ranked: Tensor, experts: int) -> Tensor:
    """Experts of rows, sorted -> where the rows of each of the first ``experts`` end."""
    bounds = torch.arange(experts, device=ranked.device, dtype=ranked.dtype)
    return torch.searchsorted(ranked, bounds, right=True).to(torch.int32)


_told_to = threading.local()


@contextlib.contextmanager
def ends_of_rows() -> Iterator[list[Tensor]]:
    """Within, on this thread: where the rows of each expert end, of every dispatch that runs, as they come."""
    outer, _told_to.found = getattr(_told_to, "found", None), []
    try:
        yield _told_to.found
    finally:
        _told_to.found = outer


def _told(ends: Tensor) -> Tensor:
    found = getattr(_told_to, "found", None)
    if found is not None:
        found.append(ends)
    return ends


@moe_dispatch.register_fake
def _(x: Tensor, expert: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.new_empty(expert.shape[0] * expert.shape[1], x.shape[1])
    return rows, x.new_empty(rows.shape[0], dtype=torch.int64), x.new_empty(num_experts, dtype=torch.int32)


@torch.library.custom_op(
    "autopar::moe_dispatch_own",
    mutates_args=(),
    schema="(Tensor x, Tensor expert, int experts, SymInt rows) -> (Tensor rows, Tensor order, Tensor offsets)",
)
def moe_dispatch_own(x: Tensor, expert: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_dispatch` of the pairs whose expert is one of the first ``experts`` [0, experts); others have any number:
    rows [n, H], order [n], offsets [experts]. n is known when it is there (the host waits for it); shapes say
    ``rows``: what each rank would get if all got as many."""
    order, ends = pairs_by_expert(expert, experts)
    return x.index_select(0, order // expert.shape[1]), order, _told(ends)


def pairs_by_expert(expert: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """expert [T, K] -> order [n] int64, t * K + k of those pairs whose expert is in [0, experts), by expert and in
    their order; and where those of each expert end, [experts] int32. The host waits for n."""
    wanted = expert.reshape(-1)
    (pairs,) = ((wanted >= 0) & (wanted < experts)).nonzero(as_tuple=True)
    ranked, place = torch.sort(wanted.index_select(0, pairs), stable=True)
    return pairs.index_select(0, place), _ends(ranked, experts)


@moe_dispatch_own.register_fake
def _(x: Tensor, expert: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    order = x.new_empty(rows, dtype=torch.int64)
    return x.new_empty(rows, x.shape[1]), order, x.new_empty(experts, dtype=torch.int32)


DISPATCHED = (torch.ops.autopar.moe_dispatch.default, torch.ops.autopar.moe_dispatch_own.default)


def _by_pair(rows: Tensor, order: Tensor, pairs: int) -> Tensor:
    """[n, H] in the order of experts -> [pairs, H] in that of tokens; zeros for pairs that are no rows."""
    made = rows.new_empty if rows.shape[0] == pairs else rows.new_zeros
    return made(pairs, rows.shape[1]).index_copy_(0, order, rows)


@torch.library.custom_op(
    "autopar::moe_dispatch_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor order, SymInt k, SymInt tokens) -> Tensor",
)
def moe_dispatch_backward(grad: Tensor, order: Tensor, k: int, tokens: int) -> Tensor:
    """grad [n, H] of the rows -> gradient of x [T, H]. A sum of K terms in fixed order: deterministic."""
    return _by_pair(grad, order, tokens * k).view(tokens, k, grad.shape[1]).sum(1)


@moe_dispatch_backward.register_fake
def _(grad: Tensor, order: Tensor, k: int, tokens: int) -> Tensor:
    return grad.new_empty(tokens, grad.shape[1])


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.tokens, ctx.k = inputs[1].shape
    ctx.arguments = len(inputs)
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)


def _dispatch_backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Any, ...]:
    others = [None] * (ctx.arguments - 1)
    if grad is None:
        return None, *others
    return torch.ops.autopar.moe_dispatch_backward(grad, *ctx.saved_tensors, ctx.k, ctx.tokens), *others


moe_dispatch.register_autograd(_dispatch_backward, setup_context=_dispatch_setup)
moe_dispatch_own.register_autograd(_dispatch_backward, setup_context=_dispatch_setup)


def _groups(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, last row + 1) of every expert that has rows."""
    start = 0
    for expert, stop in enumerate(offsets.tolist()):
        if stop > start:
            yield expert, start, stop
        start = stop


def _fused(left: Tensor, right: Tensor) -> bool:
    """Whether torch's grouped kernel takes these: bfloat16 and 16-byte rows on Hopper and Blackwell. Elsewhere torch
    loops over the groups, for which the host waits for the device."""
    if not left.is_cuda or left.dtype != torch.bfloat16 or any(n % 8 for n in (*left.shape[1:], *right.shape[1:])):
        return False
    chip = chip_of(left.device)
    return not chip.rocm and chip.capability[0] in (9, 10)


def _stay(rows: Tensor) -> bool:
    """Whether the host should not ask for offsets: it would wait for the device."""
    return rows.is_cuda


def _expert_of_row(rows: Tensor, offsets: Tensor) -> Tensor:
    """[N] int64; the number of experts behind the last offset."""
    return torch.searchsorted(offsets, torch.arange(rows.shape[0], device=rows.device, dtype=offsets.dtype), right=True)


def _clear_tail(out: Tensor, offsets: Tensor) -> Tensor:
    """The grouped kernel leaves rows behind the last offset uninitialised (seen: 6.8e34)."""
    tail = torch.arange(out.shape[0], device=out.device) >= offsets[-1]
    return out.masked_fill_(tail.unsqueeze(-1), 0.0)


@torch.library.custom_op(
    "autopar::grouped_mm",
    mutates_args=(),
    schema="(Tensor rows, Tensor weight, Tensor offsets, bool transposed) -> Tensor",
)
def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """rows [N, I] times each row's expert: weight [E, O, I], or [E, I, O] if ``transposed`` -> [N, O]."""
    matrices = weight if transposed else weight.transpose(1, 2)
    if _fused(rows, weight):
        return _clear_tail(torch.nn.functional.grouped_mm(rows.contiguous(), matrices, offs=offsets), offsets)
    if _stay(rows):
        return Tiles(offsets, rows.shape[0]).product(rows, matrices)
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for expert, start, stop in _groups(offsets):
        torch.mm(rows[start:stop], matrices[expert], out=out[start:stop])
    return out


@grouped_mm.register_fake
def _(rows: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2 if transposed else 1])


@torch.library.custom_op(
    "autopar::grouped_mm_weight_grad",
    mutates_args=(),
    schema="(Tensor grad, Tensor rows, Tensor offsets, bool transposed) -> Tensor",
)
def grouped_mm_weight_grad(grad: Tensor, rows: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """grad [N, O], rows [N, I] -> gradient of the weight, [E, O, I] or [E, I, O] if ``transposed``."""
    left, right = (rows, grad) if transposed else (grad, rows)
    if _fused(left, right):
        made = torch.nn.functional.grouped_mm(left.t(), right, offs=offsets)
        empty = offsets.diff(prepend=offsets.new_zeros(1)) == 0  # the kernel leaves these as they were
        return made.masked_fill_(empty.view(-1, 1, 1), 0.0)
    if _stay(rows):
        return Tiles(offsets, rows.shape[0]).outer(left, right)
    out = grad.new_zeros(offsets.shape[0], left.shape[1], right.shape[1])
    for expert, start, stop in _groups(offsets):
        torch.mm(left[start:stop].t(), right[start:stop], out=out[expert])
    return out


@grouped_mm_weight_grad.register_fake
def _(grad: Tensor, rows: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    left, right = (rows, grad) if transposed else (grad, rows)
    return grad.new_empty(offsets.shape[0], left.shape[1], right.shape[1])


def _mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, offsets, ctx.transposed = inputs
    ctx.save_for_backward(rows, weight, offsets)


def _mm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, weight, offsets = ctx.saved_tensors
    to_rows = to_weight = None
    if ctx.needs_input_grad[0]:
        to_rows = torch.ops.autopar.grouped_mm(grad, weight, offsets, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        to_weight = torch.ops.autopar.grouped_mm_weight_grad(grad, rows, offsets, ctx.transposed)
    return to_rows, to_weight, None, None


grouped_mm.register_autograd(_mm_backward, setup_context=_mm_setup)


@torch.library.custom_op(
    "autopar::grouped_bias", mutates_args=(), schema="(Tensor rows, Tensor bias, Tensor offsets) -> Tensor"
)
def grouped_bias(rows: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """rows [N, O] + the bias [E, O] of each row's expert."""
    if _stay(rows):
        padded = torch.cat([bias, bias.new_zeros(1, bias.shape[1])])
        return rows + padded.index_select(0, _expert_of_row(rows, offsets))
    out = rows.clone(memory_format=torch.contiguous_format)
    for expert, start, stop in _groups(offsets):
        out[start:stop] += bias[expert]
    return out


@grouped_bias.register_fake
def _(rows: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


@torch.library.custom_op("autopar::grouped_sum", mutates_args=(), schema="(Tensor rows, Tensor offsets) -> Tensor")
def grouped_sum(rows: Tensor, offsets: Tensor) -> Tensor:
    """rows [N, O] -> the sum over each expert's rows [E, O]; the transpose of `grouped_bias`."""
    if _stay(rows):
        sums = rows.new_zeros(offsets.shape[0] + 1, rows.shape[1])
        return sums.index_add_(0, _expert_of_row(rows, offsets), rows)[:-1].clone()
    out = rows.new_zeros(offsets.shape[0], rows.shape[1])
    for expert, start, stop in _groups(offsets):
        out[expert] = rows[start:stop].sum(0)
    return out


@grouped_sum.register_fake
def _(rows: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(offsets.shape[0], rows.shape[1])


def _bias_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _bias_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    to_bias = torch.ops.autopar.grouped_sum(grad, *ctx.saved_tensors) if ctx.needs_input_grad[1] else None
    return grad, to_bias, None


grouped_bias.register_autograd(_bias_backward, setup_context=_bias_setup)


@torch.library.custom_op(
    "autopar::moe_combine", mutates_args=(), schema="(Tensor rows, Tensor order, Tensor weights) -> Tensor"
)
def moe_combine(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """rows [n, H] sorted by expert, order from a dispatch, weights [T, K] -> [T, H]: each token's weighted sum over
    those of its K experts that are there."""
    tokens, k = weights.shape
    unsorted = _by_pair(rows, order, tokens * k)
    return (unsorted.view(tokens, k, rows.shape[1]) * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


@moe_combine.register_fake
def _(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty(weights.shape[0], rows.shape[1])


@torch.library.custom_op(
    "autopar::moe_combine_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor rows, Tensor order, Tensor weights) -> (Tensor rows_grad, Tensor weights_grad)",
)
def moe_combine_backward(grad: Tensor, rows: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """grad [T, H] -> gradients of the rows [n, H] and of the weights [T, K]: zero for pairs that are not there."""
    tokens, k = weights.shape
    unsorted = _by_pair(rows, order, tokens * k)
    to_weights = (unsorted.view(tokens, k, rows.shape[1]) * grad.unsqueeze(1)).sum(-1, dtype=weights.dtype)
    spread = (grad.unsqueeze(1) * weights.unsqueeze(-1)).to(rows.dtype).view(tokens * k, rows.shape[1])
    return spread.index_select(0, order), to_weights


@moe_combine_backward.register_fake
def _(grad: Tensor, rows: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows, memory_format=torch.contiguous_format), weights.new_empty(weights.shape)


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    to_rows, to_weights = torch.ops.autopar.moe_combine_backward(grad, *ctx.saved_tensors)
    return to_rows, None, to_weights


moe_combine.register_autograd(_combine_backward, setup_context=_combine_setup)

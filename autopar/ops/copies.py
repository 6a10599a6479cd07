"""Experts on other ranks get one copy of a token per rank that has one of its experts, and send back one sum of it.

    sent, counts = moe_copies(expert)             which tokens go to which rank
    splits = row_splits(counts, came)             how many rows go and come: the one time that the host waits
    x' = all_to_all_rows(take_copies(x, sent))    -> moe_dispatch_own -> products -> moe_combine = sums of x'
    y = add_copies(all_to_all_rows(sums), sent)

`dispatch_by_copies` and `combine_by_copies` are what a local graph calls; both ask for the same counts, of which a
joint graph keeps one (`autopar.passes.shared_counts`). Known as deduplicated dispatch: DeepEP (DeepSeek-AI, 2025). How
many rows come is known when they are there: shapes say how many if routing is even.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from autopar.ops import collectives as collectives  # registers the raw collectives
from autopar.ops.vocabulary import first_row

ours = torch.ops.autopar


@torch.library.custom_op(
    "autopar::moe_copies",
    mutates_args=(),
    schema="(Tensor expert, int experts, int ranks) -> (Tensor sent, Tensor counts)",
)
def moe_copies(expert: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """expert [T, K] of ``experts`` that are dealt to ``ranks`` -> sent [m] int64, tokens by rank and in their order,
    one entry per rank that has an expert of it; counts [ranks, 1] int64 of these entries. Numbers from ``experts`` on
    are nobody's."""
    wanted = torch.zeros(expert.shape[0], ranks + 1, dtype=torch.bool, device=expert.device)
    wanted.scatter_(1, (expert.long() // (experts // ranks)).clamp(max=ranks), True)
    wanted = wanted[:, :ranks]
    sent = wanted.t().nonzero()[:, 1].contiguous()
    return sent, wanted.sum(0, dtype=torch.int64).unsqueeze(1)


def even_copies(tokens: int, top: int, experts: int, ranks: int) -> int:
    """How many copies tokens make on average if each chooses ``top`` of all experts evenly."""
    top = min(top, experts)
    missed = math.comb(experts - experts // ranks, top) / math.comb(experts, top)
    return math.ceil(tokens * ranks * (1 - missed))


@moe_copies.register_fake
def _(expert: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    copies = even_copies(expert.shape[0], expert.shape[1], experts, ranks)
    return expert.new_empty(copies, dtype=torch.int64), expert.new_empty(ranks, 1, dtype=torch.int64)


@torch.library.custom_op("autopar::row_splits", mutates_args=(), schema="(Tensor counts, Tensor came) -> Tensor")
def row_splits(counts: Tensor, came: Tensor) -> Tensor:
    """counts [R, 1] of rows for each rank, came [1, R] of rows from each -> both, [2, R] int64 on the host, which waits
    for them."""
    return torch.stack([counts[:, 0], came[0]]).to("cpu", copy=True)


@row_splits.register_fake
def _(counts: Tensor, came: Tensor) -> Tensor:
    return torch.empty(2, counts.shape[0], dtype=torch.int64, device="cpu")


@torch.library.custom_op(
    "autopar::take_copies", mutates_args=(), schema="(Tensor x, Tensor sent, Tensor splits) -> Tensor"
)
def take_copies(x: Tensor, sent: Tensor, splits: Tensor) -> Tensor:
    """x [T, ...] -> [m, ...], the rows that ``sent`` [m] names."""
    return x.index_select(0, sent)


@take_copies.register_fake
def _(x: Tensor, sent: Tensor, splits: Tensor) -> Tensor:
    return x.new_empty(sent.shape[0], *x.shape[1:])


@torch.library.custom_op(
    "autopar::add_copies", mutates_args=(), schema="(Tensor rows, Tensor sent, Tensor splits, SymInt tokens) -> Tensor"
)
def add_copies(rows: Tensor, sent: Tensor, splits: Tensor, tokens: int) -> Tensor:
    """rows [m, ...] -> [tokens, ...]: the sum of what ``sent`` [m] says is of a token. Rank by rank (``splits``, as of
    `row_splits`), each of which has a token once: sums are in fixed order on every device."""
    out = rows.new_zeros(tokens, *rows.shape[1:])
    start = 0
    for count in splits[0].tolist():
        if count:
            out.index_add_(0, sent.narrow(0, start, count), rows.narrow(0, start, count))
        start += count
    return out


@add_copies.register_fake
def _(rows: Tensor, sent: Tensor, splits: Tensor, tokens: int) -> Tensor:
    return rows.new_empty(tokens, *rows.shape[1:])


def _take_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.tokens = inputs[0].shape[0]


def _take_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ours.add_copies(grad, *ctx.saved_tensors, ctx.tokens), None, None


def _add_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _add_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ours.take_copies(grad, *ctx.saved_tensors), None, None, None


take_copies.register_autograd(_take_backward, setup_context=_take_setup)
add_copies.register_autograd(_add_backward, setup_context=_add_setup)


class _ExchangeRows(torch.autograd.Function):
    """`all_to_all_rows`, whose gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Tensor, back: bool, axis: str, size: int) -> Tensor:
        ctx.save_for_backward(splits)
        ctx.facts = back, axis, size
        out: Tensor = ours.all_to_all_rows(x, splits, back, axis, size)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        back, axis, size = ctx.facts
        return ours.all_to_all_rows(grad, *ctx.saved_tensors, not back, axis, size), None, None, None, None


def exchange_rows(x: Tensor, splits: Tensor, back: bool, axis: str, size: int) -> Tensor:
    """Rows for each rank of an axis, one rank's after the other's -> those that are for this one. ``splits``: see
    `row_splits`; ``back``: rows that came go back to where they are from. Differentiable."""
    out: Tensor = _ExchangeRows.apply(x, splits, back, axis, size)
    return out


def _ways(expert: Tensor, experts: int, axis: str, size: int) -> tuple[Tensor, Tensor]:
    """(sent, splits): which tokens go, and how many rows go and come."""
    sent, counts = ours.moe_copies(expert, experts, size)
    came = ours.all_to_all(counts, 1, [], 0, [], axis, size)
    return sent, ours.row_splits(counts, came)


def dispatch_by_copies(x: Tensor, expert: Tensor, experts: int, axis: str, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """`autopar::moe_dispatch` of a rank that has ``experts`` / size consecutive ones: x [T, H] and expert [T, K] of its
    own tokens -> the rows of its own experts, of the tokens of all ranks."""
    own = experts // size
    sent, splits = _ways(expert, experts, axis, size)
    came = exchange_rows(ours.take_copies(x, sent, splits), splits, False, axis, size)
    numbers = exchange_rows(ours.take_copies(expert.int(), sent, splits), splits, False, axis, size)
    local = numbers - first_row(own, axis, size, expert.device)
    rows = expert.shape[0] * expert.shape[1]
    out: tuple[Tensor, Tensor, Tensor] = ours.moe_dispatch_own(came, local, own, rows)
    return out


def combine_by_copies(
    rows: Tensor, order: Tensor, weights: Tensor, expert: Tensor, experts: int, axis: str, size: int
) -> Tensor:
    """`autopar::moe_combine` of what `dispatch_by_copies` sorted: weights and expert [T, K] of the rank's own tokens ->
    [T, H] of them."""
    sent, splits = _ways(expert, experts, axis, size)
    came = exchange_rows(ours.take_copies(weights, sent, splits), splits, False, axis, size)
    sums = exchange_rows(ours.moe_combine(rows, order, came), splits, True, axis, size)
    out: Tensor = ours.add_copies(sums, sent, splits, weights.shape[0])
    return out

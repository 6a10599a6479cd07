"""Experts on other ranks get one row per token and chosen expert, and send each back.

    pairs, counts = moe_pairs(expert)                  (token, choice) by expert, and how many are for each
    rows = all_to_all_rows(take_pairs(x, pairs))       -> by expert here: moe_dispatch -> products
    y = moe_combine(all_to_all_rows(rows), pairs, weights)

Counts say which expert a row is for, weights stay at home. More rows than `alltoall_dedup` sends wherever two experts
of a token are on one rank; the way of Megatron-LM's all-to-all dispatcher and of transformers. Of the counts, for which
dispatch and combine both ask, a joint graph keeps one (`autopar.passes.autodiff.joint`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.declare import dense, operator
from autopar.ops.grouped_experts import inverse, pairs_by_expert
from autopar.ops.token_dispatch.alltoall_dedup import exchange_rows

ours = torch.ops.autopar


@operator("(Tensor expert, int experts, int ranks) -> (Tensor pairs, Tensor counts)", choice=True)
def moe_pairs(expert: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """expert [T, K] -> pairs [m] int64, t * K + k of those in [0, experts), by expert and in their order; counts
    [ranks, experts / ranks] int64, how many each expert has."""
    pairs, ends = pairs_by_expert(expert, experts)
    return pairs, ends.long().diff(prepend=ends.new_zeros(1, dtype=torch.int64)).view(ranks, experts // ranks)


@moe_pairs.register_fake
def _(expert: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    pairs = expert.new_empty(expert.shape[0] * expert.shape[1], dtype=torch.int64)
    return pairs, expert.new_empty(ranks, experts // ranks, dtype=torch.int64)


@operator("(Tensor x, Tensor pairs, int k) -> Tensor", lambda x, pairs, *_: x.new_empty(pairs.shape[0], *x.shape[1:]))
def take_pairs(x: Tensor, pairs: Tensor, k: int) -> Tensor:
    """x [T, H] -> [m, H], the token of each pair of it and one of its ``k`` experts."""
    return x.index_select(0, pairs // k)


@operator(
    "(Tensor came, Tensor splits, SymInt rows) -> Tensor",
    lambda came, splits, rows: came.new_empty(rows, 1, dtype=torch.int32),
    choice=True,
)
def experts_of_rows(came: Tensor, splits: Tensor, rows: int) -> Tensor:
    """came [1, R*E]: how many rows each rank has sent for each of E experts, in this order -> [n, 1] int32, the expert
    of each row. ``splits``: of `row_splits`, gives n at run time; shapes assume ``rows``."""
    ranks = splits.shape[1]
    experts = torch.arange(came.shape[1] // ranks, device=came.device, dtype=torch.int32).repeat(ranks)
    return experts.repeat_interleave(came[0], output_size=int(splits[1].sum())).unsqueeze(1)


@operator("(Tensor rows, Tensor order) -> Tensor", dense)
def unsorted_rows(rows: Tensor, order: Tensor) -> Tensor:
    """[n, H] -> [n, H] with row i at place order[i]."""
    return rows.index_select(0, inverse(order, order.shape[0]))


@operator("(Tensor rows, Tensor order) -> Tensor", dense)
def sorted_rows(rows: Tensor, order: Tensor) -> Tensor:
    """[n, H] -> [n, H] with row order[i] at place i."""
    return rows.index_select(0, order)


def _take_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, pairs, ctx.k = inputs
    ctx.tokens = x.shape[0]
    ctx.save_for_backward(pairs)


def _take_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ours.moe_dispatch_backward(grad, *ctx.saved_tensors, ctx.k, ctx.tokens), None, None


def _order_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


take_pairs.register_autograd(_take_backward, setup_context=_take_setup)
unsorted_rows.register_autograd(
    lambda ctx, g: (ours.sorted_rows(g, *ctx.saved_tensors), None), setup_context=_order_setup
)
sorted_rows.register_autograd(
    lambda ctx, g: (ours.unsorted_rows(g, *ctx.saved_tensors), None), setup_context=_order_setup
)


def _ways(expert: Tensor, experts: int, axis: str, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(pairs, came, splits): what is sent, how much is received for each expert, and the rows sent and received."""
    pairs, counts = ours.moe_pairs(expert, experts, size)
    came = ours.all_to_all(counts, 1, [], 0, [], axis, size)
    return pairs, came, ours.row_splits(counts, came)


def dispatch(x: Tensor, expert: Tensor, experts: int, axis: str, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """`autopar::moe_dispatch` of a rank that has ``experts`` / size consecutive ones: x [T, H] and expert [T, K] of its
    own tokens -> the rows of its own experts, of the tokens of all ranks."""
    pairs, came, splits = _ways(expert, experts, axis, size)
    rows = exchange_rows(ours.take_pairs(x, pairs, expert.shape[1]), splits, False, axis, size)
    numbers = ours.experts_of_rows(came, splits, expert.shape[0] * expert.shape[1])
    out: tuple[Tensor, Tensor, Tensor] = ours.moe_dispatch_own(rows, numbers, experts // size, rows.shape[0])
    return out


def combine(rows: Tensor, order: Tensor, weights: Tensor, expert: Tensor, experts: int, axis: str, size: int) -> Tensor:
    """`autopar::moe_combine` of what `dispatch` sorted: weights and expert [T, K] of the rank's own tokens ->
    [T, H] of them."""
    pairs, _, splits = _ways(expert, experts, axis, size)
    back = exchange_rows(ours.unsorted_rows(rows, order), splits, True, axis, size)
    out: Tensor = ours.moe_combine(back, pairs, weights)
    return out

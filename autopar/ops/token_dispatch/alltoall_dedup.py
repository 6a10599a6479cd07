"""Each rank with an expert of a token gets one copy of the token, and sends back one sum.

    sent, counts = moe_copies(expert)             which tokens go to which rank
    splits = row_splits(counts, came)             how many rows are sent and received: the only host synchronization
    x' = all_to_all_rows(take_copies(x, sent))    -> moe_dispatch_own -> products -> moe_combine = sums of x'
    y = add_copies(all_to_all_rows(sums), sent)

Where an axis spans nodes, a token is sent once to each node that has an expert of it, to the rank with the same index
there (level "ep/8"), which sends it to the ranks of that node ("ep%8"): the same steps twice, and sums of sums back.

`dispatch` and `combine` both ask for the same counts, of which a joint graph keeps one
(`autopar.passes.autodiff.joint`). Known as deduplicated dispatch, and in two levels from DeepEP (DeepSeek-AI,
2025). How many rows come is known when they are there: shapes say how many if routing is even.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ops import collectives as collectives  # registers the raw collectives
from autopar.ops.declare import operator
from autopar.ops.grouped_experts import sum_by_bag
from autopar.ops.vocab_parallel import first_row

ours = torch.ops.autopar


@operator(
    "(Tensor expert, Tensor? first, int experts, int ranks, int every) -> (Tensor sent, Tensor counts)", choice=True
)
def moe_copies(expert: Tensor, first: Tensor | None, experts: int, ranks: int, every: int) -> tuple[Tensor, Tensor]:
    """expert [T, K] of which [first, first + ``experts``) are dealt to ``ranks`` -> sent [m] int64, tokens by rank and
    in their order, one entry per rank that has an expert of it; counts [ranks, 1] int64 of these entries. ``first``:
    [1] (None: 0). Other experts are ignored. Shapes assume an even choice among ``every`` experts."""
    wanted = torch.zeros(expert.shape[0], ranks + 1, dtype=torch.bool, device=expert.device)
    wanted.scatter_(1, holders_of(expert if first is None else expert - first, experts, ranks), True)
    wanted = wanted[:, :ranks]
    sent = wanted.t().nonzero()[:, 1].contiguous()
    return sent, wanted.sum(0, dtype=torch.int64).unsqueeze(1)


def holders_of(expert: Tensor, experts: int, ranks: int) -> Tensor:
    """int64: which of ``ranks`` has an expert of [0, experts), in consecutive runs; ``ranks`` for other experts."""
    there = (expert >= 0) & (expert < experts)
    return torch.where(there, expert.long() // (experts // ranks), ranks)


def even_copies(tokens: int, top: int, experts: int, ranks: int, every: int = 0) -> int:
    """The average number of copies that tokens send to ``ranks`` with ``experts``, if each token chooses ``top`` of
    ``every`` experts (0: of these) evenly, and at least one of these."""
    every = every or experts
    top = min(top, every)

    def reached(count: int) -> float:
        return 1 - math.comb(every - count, top) / math.comb(every, top)

    return math.ceil(tokens * ranks * reached(experts // ranks) / reached(experts))


@moe_copies.register_fake
def _(expert: Tensor, first: Tensor | None, experts: int, ranks: int, every: int) -> tuple[Tensor, Tensor]:
    copies = even_copies(expert.shape[0], expert.shape[1], experts, ranks, every)
    return expert.new_empty(copies, dtype=torch.int64), expert.new_empty(ranks, 1, dtype=torch.int64)


@operator(
    "(Tensor counts, Tensor came) -> Tensor",
    lambda counts, *_: torch.empty(2, counts.shape[0], dtype=torch.int64, device="cpu"),
    choice=True,
)
def row_splits(counts: Tensor, came: Tensor) -> Tensor:
    """counts [R, n] of rows for each rank, came [1, R*n] of rows from each -> both, [2, R] int64 on the host, which
    waits for them."""
    return torch.stack([counts.sum(1), came.view_as(counts).sum(1)]).to("cpu", copy=True)


@operator(
    "(Tensor x, Tensor sent, Tensor splits) -> Tensor", lambda x, sent, *_: x.new_empty(sent.shape[0], *x.shape[1:])
)
def take_copies(x: Tensor, sent: Tensor, splits: Tensor) -> Tensor:
    """x [T, ...] -> [m, ...], the rows with the indices ``sent`` [m]."""
    return x.index_select(0, sent)


@operator(
    "(Tensor rows, Tensor sent, Tensor splits, SymInt tokens) -> Tensor",
    lambda rows, sent, splits, tokens: rows.new_empty(tokens, *rows.shape[1:]),
)
def add_copies(rows: Tensor, sent: Tensor, splits: Tensor, tokens: int) -> Tensor:
    """rows [m, ...] -> [tokens, ...]: the sum of the rows of each token, by ``sent`` [m], in the order of rows on
    every device. ``splits``: as of `row_splits`."""
    token, places = sent.sort(stable=True)
    starts = torch.searchsorted(token, torch.arange(tokens, device=rows.device))
    flat = rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))
    return sum_by_bag(flat, places, starts).view(tokens, *rows.shape[1:])


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
    """`all_to_all_rows`, whose gradient is sent back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Tensor, back: bool, axis: str, size: int, rows: int) -> Tensor:
        ctx.save_for_backward(splits)
        ctx.facts = not back, axis, size, x.shape[0] if rows else 0
        out: Tensor = ours.all_to_all_rows(x, splits, back, axis, size, rows)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ours.all_to_all_rows(grad, *ctx.saved_tensors, *ctx.facts), None, None, None, None, None


def exchange_rows(x: Tensor, splits: Tensor, back: bool, axis: str, size: int, rows: int = 0) -> Tensor:
    """Rows for each rank of an axis, concatenated in the order of ranks -> those that are for this one. ``splits``: see
    `row_splits`; ``back``: send received rows back to where they came from; ``rows``: how many the result has, padding
    behind those received (0: none). Differentiable."""
    out: Tensor = _ExchangeRows.apply(x, splits, back, axis, size, rows)
    return out


@dataclass(frozen=True)
class _NodeLevel:
    """Ranks that exchange copies: ``size`` ones along ``axis``, among which [first, first + ``experts``) are dealt."""

    axis: str
    size: int
    first: Tensor | None
    experts: int


@dataclass
class _Copies:
    """Tokens of a level that are sent to the next level, or to the experts; ``expert`` [T, K]: among ``every``."""

    level: _NodeLevel
    expert: Tensor
    every: int

    def __post_init__(self) -> None:
        at = self.level
        self.sent, counts = ours.moe_copies(self.expert, at.first, at.experts, at.size, self.every)
        came = ours.all_to_all(counts, 1, [], 0, [], at.axis, at.size)
        self.splits = ours.row_splits(counts, came)

    def there(self, x: Tensor) -> Tensor:
        """x [T, ...] of this level's tokens -> the received copies."""
        rows = ours.take_copies(x, self.sent, self.splits)
        return exchange_rows(rows, self.splits, False, self.level.axis, self.level.size)

    def back(self, sums: Tensor) -> Tensor:
        """Results for the received copies -> their sums [T, ...] for this level's tokens."""
        rows = exchange_rows(sums, self.splits, True, self.level.axis, self.level.size)
        out: Tensor = ours.add_copies(rows, self.sent, self.splits, self.expert.shape[0])
        return out


def _levels(experts: int, axis: str, size: int, per_node: int, device: torch.device) -> list[_NodeLevel]:
    """The axis itself, or, for ranks on several nodes, first among nodes and then within each."""
    nodes = size // per_node
    if 1 in (nodes, per_node):
        return [_NodeLevel(axis, size, None, experts)]
    own = experts // nodes
    node = first_row(experts // size, axis, size, device) // own * own
    return [
        _NodeLevel(f"{axis}/{per_node}", nodes, None, experts),
        _NodeLevel(f"{axis}%{per_node}", per_node, node, own),
    ]


def _ways(expert: Tensor, experts: int, axis: str, size: int, per_node: int) -> tuple[list[_Copies], Tensor]:
    """The levels that copies go through, and the experts of those received last."""
    found, numbers = [], expert.int()
    for level in _levels(experts, axis, size, per_node, expert.device):
        found.append(_Copies(level, numbers, experts))
        numbers = found[-1].there(numbers)
    return found, numbers


def dispatch(
    x: Tensor, expert: Tensor, experts: int, axis: str, size: int, per_node: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """`autopar::moe_dispatch` of a rank that has ``experts`` / size consecutive ones: x [T, H] and expert [T, K] of its
    own tokens -> the rows of its own experts, of the tokens of all ranks. ``per_node``: how many consecutive ranks
    are one node; one, or all of them: no levels."""
    own = experts // size
    ways, numbers = _ways(expert, experts, axis, size, per_node)
    for way in ways:
        x = way.there(x)
    local = numbers - first_row(own, axis, size, expert.device)
    rows = expert.shape[0] * expert.shape[1]
    out: tuple[Tensor, Tensor, Tensor] = ours.moe_dispatch_own(x, local, own, rows)
    return out


def combine(
    rows: Tensor, order: Tensor, weights: Tensor, expert: Tensor, experts: int, axis: str, size: int, per_node: int = 1
) -> Tensor:
    """`autopar::moe_combine` of what `dispatch` sorted: weights and expert [T, K] of the rank's own tokens ->
    [T, H] of them."""
    ways, _ = _ways(expert, experts, axis, size, per_node)
    for way in ways:
        weights = way.there(weights)
    out: Tensor = ours.moe_combine(rows, order, weights)
    for way in reversed(ways):
        out = way.back(out)
    return out

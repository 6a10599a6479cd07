"""`autopar::dealt_rows`: rows that ranks have computed for each other, sent to those that need them.

    rank 0 computes a b, for ranks 0 1                          rank 0 has a c
    rank 1 computes c d, for ranks 0 1       -- splits -->      rank 1 has b d

Who computes what is decided on the host before a step, so how many rows go where is an input: no counts are exchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.declare import operator
from autopar.ops.token_dispatch.alltoall_dedup import exchange_rows

ours = torch.ops.autopar


@operator(
    "(Tensor x, Tensor splits, bool back, int rows, str axis) -> Tensor",
    lambda x, splits, back, rows, axis: x.new_empty(*x.shape[:2], rows, *x.shape[3:]),
)
def dealt_rows(x: Tensor, splits: Tensor, back: bool, rows: int, axis: str) -> Tensor:
    """x [D, M, F, W]: of each of D ranks of an axis, M times on its own, F rows: those for rank 0, those for rank 1,
    ..., and padding -> [D, M, ``rows``, W]: those from rank 0, from rank 1, ..., and zeros. splits [D, M, 2, D]: how
    many rows a rank sends to each and receives from each; ``back``: send received rows back."""
    made, sent = x.new_zeros(*x.shape[:2], rows, *x.shape[3:]), splits[:, :, int(back)]
    for m in range(x.shape[1]):
        parts = [part[: sum(n)].split(n) for part, n in zip(x[:, m], sent[:, m].tolist(), strict=True)]
        for rank in range(x.shape[0]):
            come = torch.cat([part[rank] for part in parts])
            made[rank, m, : len(come)] = come
    return made


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, splits, back, _, axis = inputs
    ctx.save_for_backward(splits)
    ctx.facts = not back, x.shape[2], axis


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ours.dealt_rows(grad, *ctx.saved_tensors, *ctx.facts), None, None, None, None


dealt_rows.register_autograd(_backward, setup_context=_setup)


def dealt_rows_of_rank(x: Tensor, splits: Tensor, back: bool, rows: int, axis: str, ranks: int) -> Tensor:
    """`dealt_rows` on a rank, by an exchange over the axis: x [1, M, F, W] -> [1, M, ``rows``, W]. Differentiable."""
    found = []
    for part, split in zip(x[0].unbind(0), splits[0].unbind(0), strict=True):
        counts = ours.row_splits(split[0].unsqueeze(1), split[1].unsqueeze(0))
        found.append(exchange_rows(part, counts, back, axis, ranks, rows))
    return torch.stack(found).unsqueeze(0)

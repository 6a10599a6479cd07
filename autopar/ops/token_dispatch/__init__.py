"""Token dispatchers in the graph of a rank: what stands for `autopar::moe_dispatch` and `autopar::moe_combine` there.

allgather                   tokens of all ranks, of which a rank takes the rows of its experts
alltoall                    a row per token and expert
alltoall_dedup              a copy per token and rank; with nodes (hierarchical) first per token and node

`dealt_rows` sends rows to ranks that the host has chosen. Dispatchers have one file each, which the rows of
`autopar.token_dispatchers` name, with two functions:

    dispatch(x, expert, experts, axis, ranks[, per_node])                       -> rows, order, offsets
    combine(rows, order, weights, expert, experts, axis, ranks[, per_node])     -> y

x [T, H] and expert, weights [T, K] are of the rank's own tokens; rows are those of its ``experts`` / ranks experts,
sorted by expert. ``per_node``: only where the row says `over_nodes`. A dispatcher whose row says `gathers` is given the
tokens of all ranks, and needs no combine.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import Tensor

from autopar.token_dispatchers import TOKEN_DISPATCHERS


def dispatch_tokens(
    x: Tensor, expert: Tensor, experts: int, dispatcher: str, axis: str, ranks: int, per_node: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`autopar::moe_dispatch` by a token dispatcher, where experts are sharded on an axis."""
    out: tuple[Tensor, Tensor, Tensor] = _function("dispatch", dispatcher, per_node)(x, expert, experts, axis, ranks)
    return out


def combine_tokens(
    rows: Tensor, order: Tensor, weights: Tensor, expert: Tensor, experts: int, dispatcher: str, axis: str, ranks: int,
    per_node: int,
) -> Tensor:  # fmt: skip
    """`autopar::moe_combine` of what `dispatch_tokens` has sorted."""
    combine = _function("combine", dispatcher, per_node)
    out: Tensor = combine(rows, order, weights, expert, experts, axis, ranks)
    return out


def _function(name: str, dispatcher: str, per_node: int) -> Any:
    row = TOKEN_DISPATCHERS[dispatcher]
    function = getattr(importlib.import_module(row.module), name)
    return functools.partial(function, per_node=per_node) if row.over_nodes else function

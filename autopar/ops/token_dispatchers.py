"""Token dispatchers: how tokens get to experts on other ranks, by the values of the option ``token_dispatcher``. Each
is a function that replaces `autopar::moe_dispatch`, and one for `autopar::moe_combine`, in the graph of a rank.

    dispatch(x, expert, experts, axis, ranks[, per node])                    -> rows, order, offsets
    combine(rows, order, weights[, expert, experts, axis, ranks[, per node]])  -> y

A new dispatcher is an entry here, its name in `autopar.options.TOKEN_DISPATCHERS` and its cost in
`autopar.cost.expert_traffic`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ops.alltoall_dedup_dispatch import combine_by_copies, dispatch_by_copies
from autopar.ops.alltoall_dispatch import combine_by_pairs, dispatch_by_pairs
from autopar.ops.grouped_experts import dispatch_to_piece


@dataclass(frozen=True)
class Dispatcher:
    """See the module's docstring. nodes: both functions take the number of ranks per node as an argument."""

    dispatch: Callable[..., Any]
    combine: Callable[..., Any]
    nodes: bool = False


DISPATCHERS = {
    "allgather": Dispatcher(dispatch_to_piece, torch.ops.autopar.moe_combine.default),
    "alltoall": Dispatcher(dispatch_by_pairs, combine_by_pairs),
    "alltoall_dedup": Dispatcher(dispatch_by_copies, combine_by_copies),
    "hierarchical": Dispatcher(dispatch_by_copies, combine_by_copies, nodes=True),
}

"""Experts on other ranks get the tokens of all ranks of the axis, gathered before; each takes the rows of its own.

    x', expert' = all_gather(x), all_gather(expert)
    rows, order, offsets = moe_dispatch_own(x', expert')      -> products -> moe_combine = addends, reduce-scattered

Gather and reduce-scatter are conversions of the plan, so that no combine of its own is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ops import grouped_experts as grouped_experts  # registers the operators
from autopar.ops.vocab_parallel import first_row


def dispatch(x: Tensor, expert: Tensor, experts: int, axis: str, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """`autopar::moe_dispatch` on a rank that holds ``experts`` / size consecutive experts: x [T, H] and expert [T, K]
    of all ranks -> the rows of its own."""
    own = experts // size
    local = expert - first_row(own, axis, size, expert.device)
    rows = expert.shape[0] * expert.shape[1] // size
    out: tuple[Tensor, Tensor, Tensor] = torch.ops.autopar.moe_dispatch_own(x, local, own, rows)
    return out

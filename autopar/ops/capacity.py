"""A capacity of experts: how many tokens one takes, of all tokens of a step, in their order.

expert = within_capacity(expert, E, C)      pairs of a token and an expert that has had C before are nobody's
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op(
    "autopar::within_capacity",
    mutates_args=(),
    schema="(Tensor expert, int experts, int capacity) -> Tensor",
)
def within_capacity(expert: Tensor, experts: int, capacity: int) -> Tensor:
    """expert [T, K] int, of all tokens -> the same, but ``experts``, which is nobody's number, from an expert's place
    ``capacity`` on. Places are counted in the order of tokens, and of a token's choices."""
    ranked, order = torch.sort(expert.reshape(-1), stable=True)
    place = torch.arange(ranked.shape[0], device=ranked.device) - torch.searchsorted(ranked, ranked)
    kept = torch.where(place < capacity, ranked, torch.full_like(ranked, experts))
    return torch.empty_like(ranked).index_copy_(0, order, kept).view(expert.shape)


@within_capacity.register_fake
def _(expert: Tensor, experts: int, capacity: int) -> Tensor:
    return torch.empty_like(expert, memory_format=torch.contiguous_format)

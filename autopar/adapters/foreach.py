"""Operations on many tensors in one call, which torch keeps behind an underscore."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_all(sums: Sequence[Tensor], addends: Sequence[Tensor]) -> None:
    """sums[i] += addends[i], in place."""
    torch._foreach_add_(list(sums), list(addends))

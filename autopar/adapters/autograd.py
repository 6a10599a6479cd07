"""What autograd knows: of the backward that runs, of writes to a tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def keeps_graph() -> bool:
    """Within a backward: whether it was called with retain_graph=True."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def version_of(x: Tensor) -> int:
    """How often a tensor, or one that shares its counter, was written to in place. 0 for one of inference mode, which
    has no counter, and does not say so once ``x.data`` was replaced."""
    try:
        return int(x._version)
    except RuntimeError:
        return 0

"""State of autograd: the running backward, and version counters of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def keeps_graph() -> bool:
    """Whether the running backward was called with retain_graph=True."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def version_of(x: Tensor) -> int:
    """The version counter of a tensor. 0 for an inference tensor, which has none (``is_inference`` may be wrong after
    ``x.data`` was replaced)."""
    try:
        return int(x._version)
    except RuntimeError:
        return 0

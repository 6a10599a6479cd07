"""Whether torch's profiler is recording: only then are names created for it, since each takes microseconds."""

from __future__ import annotations

import torch.autograd.profiler


def is_profiled() -> bool:
    """Within `torch.profiler.profile` or `torch.autograd.profiler.profile`."""
    return bool(torch.autograd.profiler._is_profiler_enabled)

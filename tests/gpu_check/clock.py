"""How long a call takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

CALLS = 20


def milliseconds(call: Callable[[], object], is_gpu: bool) -> float:
    """The mean of some calls, behind a few others; on a GPU from before the first starts until the last has ended."""
    for _ in range(3):
        call()
    wait = torch.cuda.synchronize if is_gpu else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    wait()
    return (time.perf_counter() - start) / CALLS * 1e3

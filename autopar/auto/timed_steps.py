"""Seconds of real training steps of a parallel model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

WARMUP, STEPS = 2, 5


class Trains(Protocol):
    """A parallel model."""

    def train_step(self, *args: Any, **batch: Any) -> Any: ...


def timed_steps(
    parallel: Trains, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor], device: torch.device,
    warmup: int = WARMUP, steps: int = STEPS,
) -> float:  # fmt: skip
    """Seconds of a step with its optimizer: the median, of the slowest rank. Collective."""
    times = []
    for _ in range(warmup + steps):
        _wait(device)
        start = time.perf_counter()
        parallel.train_step(**batch)
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        times.append(time.perf_counter() - start)
    return slowest(statistics.median(times[warmup:]), device)


def slowest(seconds: float, device: torch.device) -> float:
    """The maximum over all ranks."""
    found = torch.tensor([seconds], dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""`Metrics`: what a server counts and measures, as plain numbers."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)  # seconds


@dataclass
class Histogram:
    """Durations. counts[i]: those up to ``bounds[i]`` seconds and above the bound before; the last: longer ones."""

    bounds: tuple[float, ...] = BOUNDS
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    sum: float = 0.0  # seconds

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect.bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


@dataclass
class Metrics:
    """Of the leader, over all replicas. Pages are those of all window kinds."""

    running: int = 0  # requests
    waiting: int = 0
    pages_used: int = 0
    pages_free: int = 0  # those with known content among them
    generated_tokens: int = 0  # since the start, as all that follows
    prompt_tokens: int = 0  # of requests that have joined, those that join again after preemption included
    cached_tokens: int = 0  # of these: found in the cache
    preempted: int = 0  # how often a running request went back to waiting, for want of pages
    steps: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # requests by finish_reason
    first_token: Histogram = field(default_factory=Histogram)  # from submission
    next_token: Histogram = field(default_factory=Histogram)  # between two tokens of a request

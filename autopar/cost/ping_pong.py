"""Attention and experts on GPUs of their own, with microbatches that take turns (MegaScale-Infer, Zhu et al. 2025).

    attention  A1 A2 A3 A1 A2 A3 ...        a microbatch's rows go to the experts and come back
    experts       E1 E2 E3 E1 E2 E3 ...     while the other microbatches compute

Links carry several messages at a time: an exchange takes as long whatever else is on its way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class LayerTimes(NamedTuple):
    """Seconds of one layer and microbatch; numbers, or arrays of as many deployments. exchange: in one direction."""

    attention: Any
    experts: Any
    exchange: Any


def step_seconds(times: LayerTimes, layers: int, microbatches: Any) -> Any:
    """Seconds from the first attention until the last result is back.

    A microbatch's round through a layer is r = Ta + Te + 2 Tc. A layer begins max(m Ta, m Te, r) after the one before:
    the busier role has m microbatches to compute, and each must be back. The last microbatch follows the first one
    by m - 1 times the longer of Ta and Te.
    """
    attention, experts, exchange = times
    longer = np.maximum(attention, experts)
    first = attention + experts + 2 * exchange
    period = np.maximum(microbatches * longer, first)
    return first + (layers - 1) * period + (microbatches - 1) * longer


def exposed_seconds(times: LayerTimes, layers: int) -> Any:
    """Attention and experts on the same GPUs, one batch: nothing computes during exchanges."""
    return layers * (times.attention + times.experts + 2 * times.exchange)


def overlapped_seconds(times: LayerTimes, layers: int) -> Any:
    """The same with two half batches: rows of one go to the experts during the attention of the other, and return
    during its experts. ``times``: of a half."""
    attention, experts, exchange = times
    return 2 * layers * (np.maximum(attention, exchange) + np.maximum(experts, exchange))


@dataclass(frozen=True)
class Interval:
    """What a role computes: ``role`` is "attention" or "experts", ``layer`` and ``microbatch`` count from 0."""

    role: str
    layer: int
    microbatch: int
    start: float
    end: float


def simulated(times: LayerTimes, layers: int, microbatches: int) -> list[Interval]:
    """Each role computes what has arrived, one microbatch at a time, in order of layers and microbatches."""
    free = {"attention": 0.0, "experts": 0.0}
    arrived = [0.0] * microbatches
    found = []
    for layer in range(layers):
        for role, seconds in (("attention", times.attention), ("experts", times.experts)):
            for i in range(microbatches):
                start = max(arrived[i], free[role])
                free[role] = start + seconds
                arrived[i] = free[role] + times.exchange
                found.append(Interval(role, layer, i, start, free[role]))
    return found

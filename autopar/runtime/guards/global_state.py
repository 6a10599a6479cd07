"""Global torch state that changes what a step computes: autocast, the default dtype, deterministic algorithms.

with outside(device) as surroundings:      a step's graph contains the casts of autocast, so it is compiled and run
    ...                                    outside of autocast
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch


class GlobalTorchState(NamedTuple):
    """autocast: its dtype, None if it is off. The other fields have torch's names."""

    autocast: torch.dtype | None
    default_dtype: torch.dtype
    deterministic: bool


@contextlib.contextmanager
def outside(device: torch.device) -> Iterator[GlobalTorchState]:
    """Context manager: yields the global state around the block and turns autocast off inside.

    Raises ValueError for autocast on a GPU: steps are captured on the CPU, where torch casts other operators.
    """
    casts = torch.is_autocast_enabled(device.type)
    if casts and device.type != "cpu":
        raise ValueError(
            f"autocast: steps are captured on the CPU, found autocast on {device.type}, which casts other operators; "
            "turn autocast off and choose the model's dtype: model.to(torch.bfloat16)"
        )
    found = GlobalTorchState(
        torch.get_autocast_dtype(device.type) if casts else None,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )
    with torch.autocast(device.type, enabled=False) if casts else contextlib.nullcontext():
        yield found


def need_gradients() -> None:
    """Raises ValueError for a step with gradients where grad mode is off."""
    if not torch.is_grad_enabled():
        raise ValueError(
            "train_step: needs grad mode, found it off (no_grad or inference_mode around the step); "
            "call it outside of them, or use eval_step(**batch)"
        )


def no_anomalies() -> None:
    """Raises ValueError in anomaly mode, which only works for an eager backward."""
    if torch.is_anomaly_enabled():
        raise ValueError(
            "detect_anomaly: needs an eager backward, found a compiled step; look for NaN in the gradients after the "
            "step, or run the model in one process"
        )

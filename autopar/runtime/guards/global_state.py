"""What surrounds a step and changes what it computes: autocast, the default dtype, deterministic algorithms.

with outside(device) as surroundings:      the casts of an autocast are part of a step's graph, which is compiled
    ...                                    and run outside of it
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch


class GlobalTorchState(NamedTuple):
    """autocast: its dtype, if there is one. The others: what torch calls them."""

    autocast: torch.dtype | None
    default_dtype: torch.dtype
    deterministic: bool


@contextlib.contextmanager
def outside(device: torch.device) -> Iterator[GlobalTorchState]:
    """What surrounds the block; within it there is no autocast.

    Raises ValueError for an autocast on a GPU: steps are captured on the CPU, where other operators are cast.
    """
    casts = torch.is_autocast_enabled(device.type)
    if casts and device.type != "cpu":
        raise ValueError(
            f"autocast: steps are captured on the CPU, whose list of operators to cast is not that of {device.type}; "
            "leave the autocast, and choose the dtype of the model: model.to(torch.bfloat16)"
        )
    found = GlobalTorchState(
        torch.get_autocast_dtype(device.type) if casts else None,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )
    with torch.autocast(device.type, enabled=False) if casts else contextlib.nullcontext():
        yield found


def need_gradients() -> None:
    """Raises ValueError for a step with gradients where torch makes none."""
    if not torch.is_grad_enabled():
        raise ValueError(
            "train_step: makes gradients, found grad mode off (no_grad or inference_mode around the step); "
            "leave it, or use eval_step(**batch)"
        )


def no_anomalies() -> None:
    """Raises ValueError where torch would watch an eager backward."""
    if torch.is_anomaly_enabled():
        raise ValueError(
            "detect_anomaly: watches the operators of an eager backward, found a step on a mesh, which has none; "
            "look for NaN in the gradients after the step, or run the model on one process"
        )

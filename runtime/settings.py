"""What `init_mesh` is given besides the axes: a device, and how long a collective may take."""

from __future__ import annotations

import os
from datetime import timedelta

import torch

DEFAULT_TIMEOUT = 600.0  # seconds


def device_kind(device: str | torch.device | None) -> str:
    """'cpu' or 'cuda'; by default cuda where there is one. Raises ValueError for anything else."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(device, (str, torch.device)):
        raise ValueError(
            f'init_mesh: needs the device first and the axes by name, found {device!r}; write init_mesh("cpu", dp=2)'
        )
    kind = str(device).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"init_mesh: expected the device 'cpu' or 'cuda', found {str(device)!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("init_mesh: the device 'cuda' needs a GPU that torch sees, found none; use 'cpu'")
    return kind


def time_limit(timeout: float | timedelta | None) -> timedelta:
    """Of a collective: as given, else $AUTOPAR_TIMEOUT, else 600 seconds. Raises ValueError for what is no time."""
    given = os.environ.get("AUTOPAR_TIMEOUT", DEFAULT_TIMEOUT) if timeout is None else timeout
    name = "AUTOPAR_TIMEOUT" if timeout is None else "timeout"
    try:
        found = given if isinstance(given, timedelta) else timedelta(seconds=float(given))
    except (TypeError, ValueError, OverflowError):
        found = timedelta(0)
    if found <= timedelta(0) or isinstance(given, bool):
        raise ValueError(f"{name}: expected seconds above 0, found {given!r}; 600 is the default")
    return found

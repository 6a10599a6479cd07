"""Between the host and a device, without the host waiting."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """On the device, contiguous. From the host to a GPU it goes through pinned memory, so that the host does not wait:
    of a tensor that is pinned already (``DataLoader(pin_memory=True)``) there is no other copy, and it must stay as it
    is until it is there, as with ``x.to(device, non_blocking=True)``."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device).contiguous()
    whole = x.contiguous()  # here: strided copies between devices are made by waiting
    return (whole if whole.is_pinned() else whole.pin_memory()).to(device, non_blocking=True)


def to_host(x: Tensor) -> tuple[Tensor, torch.Event | None]:
    """(a tensor on the host, what says that its values are there). None: they are."""
    if x.device.type == "cpu":
        return x, None
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    return host, torch.accelerator.current_stream().record_event()

"""Chips of which a stack reaches everything."""

from __future__ import annotations

from autopar.chips import Chip
from autopar.cost.efficiency import Stack
from autopar.cost.hardware import Device


def device(name: str, flops: float, memory: float, float32: float = 0.0, launch: float = 0.0) -> Device:
    """flops, float32: operations of products and of attention per second. memory: bytes. launch: seconds."""
    whole = {"flash2": 1.0}
    chip = Chip(flops, float32 or flops, float32 or flops, memory)
    return Device(name, chip, Stack(name, name, 1.0, whole, whole, 1.0, 1.0, 1.0, launch=launch))

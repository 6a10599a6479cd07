"""Samples of a CPU tensor's memory, to detect writes that version counters miss (``p.data.mul_(2)``).

They are read at an address, without keeping the memory alive: only while a tensor is alive and lies where it lay.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_WORDS = {8: ctypes.c_uint64, 4: ctypes.c_uint32, 2: ctypes.c_uint16, 1: ctypes.c_uint8}

value_of: Callable[[Any], int] = operator.attrgetter("value")
place_of: Callable[[Tensor], int] = torch.Tensor.data_ptr


def sampled_words(x: Tensor) -> list[Any]:
    """The first, middle and last element of a contiguous tensor on the host, for `value_of`; of others none."""
    if x.device.type != "cpu" or x.layout != torch.strided or not x.numel() or not x.is_contiguous():
        return []
    kind = _WORDS.get(x.itemsize)
    if kind is None or not x.data_ptr():
        return []
    places = sorted({0, x.numel() // 2, x.numel() - 1})
    return [kind.from_address(x.data_ptr() + place * x.itemsize) for place in places]

"""The exchanges between ranks that an attention algorithm is written with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Like:
    """Shape and dtype of a tensor that will be received."""

    shape: tuple[int, ...]
    dtype: torch.dtype


WAYS = ("up", "down", "home")  # which run concurrently
Sent = tuple[int, Sequence[Tensor]]  # to a rank
Expected = tuple[int, Sequence[Like]]  # from a rank


class Pending(Protocol):
    """An exchange in flight."""

    def wait(self) -> list[Tensor]:
        """Block until all of it has been sent and received; returns the received tensors, possibly none."""


class Comm(Protocol):
    """One rank's end of the exchanges along an axis. Ranks are coordinates on it.

    Exchanges of different ``way`` run concurrently: "up" (to rank + 1), "down" (to rank - 1) and "home" (to any rank).
    Within one way, the messages of a pair of ranks are matched by order.
    """

    rank: int
    size: int

    def exchange(self, way: str, what: str, send: Sent | None, receive: Expected | None) -> Pending:
        """Start sending contiguous tensors to a rank and receiving some from a rank; either may be None. The tensors
        must not change before `wait`. ``what``: a word for what is sent, for pictures and messages."""

    def all_gather(self, what: str, x: Tensor) -> Pending:
        """Start gathering x of every rank; `wait` returns one tensor [size, *x.shape]."""

    def reduce_scatter(self, what: str, x: Tensor) -> Pending:
        """Start summing x [size, ...] over all ranks; `wait` returns one tensor, this rank's entry of the sum."""

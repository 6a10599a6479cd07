"""`Experts`: how the questions of a bound graph (`autopar::ask_experts`) are answered."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Experts(Protocol):
    """Gets tokens to the ranks of the experts' role, and their results back."""

    def start(self, layer: int, x: Tensor, expert: Tensor | None, weights: Tensor | None) -> Any:
        """Ask ``layer``, without waiting: x [T, H], expert and weights [T, K], as `autopar.ops.grouped_experts` says.
        Returns what `finish` takes."""

    def finish(self, pending: Any) -> Tensor:
        """Wait for the answer [T, H], right before its first user, who may overwrite it."""

"""Scales of products in few bits from earlier steps (delayed scaling, as in NVIDIA's Transformer Engine).

A step notes the greatest magnitude of each operand. At its end ranks agree on all of them in one exchange, and the next
step scales by the greatest of the last steps, or by the last. So no step waits for magnitudes of its own operands:

    step t:    scale = magnitude of steps < t, over the greatest number of the format, times 2^margin
               now   = max(now, |operand|)                           over microbatches, token slices and ranks
    its end:   history = [now, *history[:-1]]

A first step has no history: its operands have the scales of their own magnitudes, on which ranks agree at once. Noting
a magnitude twice changes nothing, so a recomputation may. What is not finite is not noted, and the scale is as little
finite, so that the product shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

OPERANDS = ("input", "weight", "gradient")  # of a product, as the first letters of its keys


def keys_of(weight: str) -> list[str]:
    """The keys of the operands of a weight's products."""
    return [f"{operand} {weight}" for operand in OPERANDS]


class DelayedScales:
    """The history of a model's operands.

    weights: those whose products are scaled. history: the number of steps. amax: "max", the greatest of these, or
    "most_recent", the last one that is not zero. agree: the maximum of a tensor over the ranks of an axis. share: over
    all ranks; both return it, and one process needs none.
    """

    def __init__(
        self,
        weights: Collection[str],
        history: int,
        amax: str,
        margin: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        agree: Callable[[Tensor, str], Tensor] = lambda x, axis: x,
        share: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        keys = [key for weight in sorted(weights) for key in keys_of(weight)]
        self._at = {key: i for i, key in enumerate(keys)}
        self._amax, self._margin, self._agree, self._share = amax, margin, agree, share
        self.steps = 0
        self._history = torch.zeros((history, len(keys)), dtype=dtype, device=device)
        self._now, self._greatest = torch.zeros_like(self._history[0]), torch.zeros_like(self._history[0])
        self._notes = False

    @contextmanager
    def used(self, notes: bool) -> Iterator[None]:
        """Context manager: products are scaled by these. ``notes``: whether they note their operands."""
        before, self._notes = self._notes, notes
        _used.append(self)
        try:
            yield
        finally:
            _used.remove(self)
            self._notes = before

    def magnitude(self, own: Tensor, axes: list[str], key: str) -> Tensor:
        """What the scale of an operand is made of: [1, 1] from the magnitude of a rank's shard over ``axes``."""
        i = self._at[key]
        if self._notes:
            self._now[i : i + 1] = torch.maximum(self._now[i : i + 1], own.view(1).to(self._now.dtype))
        found = self._greatest[i : i + 1].to(own.dtype).view(own.shape)
        if not self.steps:
            found = own
            for axis in axes:
                found = self._agree(found, axis)
        return torch.where(own.isfinite(), found * 2.0**self._margin, own)

    def advance(self) -> None:
        """A step has ended. Collective."""
        now = self._share(self._now)
        self._history = torch.cat([torch.where(now.isfinite(), now, 0.0)[None], self._history[:-1]])
        self._now = torch.zeros_like(now)
        self.steps += 1
        self._choose()

    def _choose(self) -> None:
        if self._amax == "max":
            self._greatest = self._history.amax(0)
        else:
            newest = (self._history > 0).int().argmax(0)
            self._greatest = self._history.gather(0, newest[None])[0]

    def get_extra_state(self) -> dict[str, Any]:
        """For checkpoints: equal on all ranks."""
        return {"operands": list(self._at), "steps": self.steps, "magnitudes": self._history}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Operands that the state does not have begin without a history. Raises ValueError for a damaged one."""
        operands, steps, found = (state.get(name) for name in ("operands", "steps", "magnitudes"))
        if (
            not (isinstance(found, Tensor) and isinstance(operands, list) and isinstance(steps, int))
            or steps < 0
            or found.dim() != 2
            or found.shape[1] != len(operands)
        ):
            raise ValueError(
                "load: expected the magnitudes of operands in few bits, a row for each step and a column for each "
                "operand, found something else; load an older checkpoint"
            )
        self._history, self._now = torch.zeros_like(self._history), torch.zeros_like(self._now)
        rows = min(len(found), len(self._history))
        columns = [(self._at[name], i) for i, name in enumerate(operands) if name in self._at]
        for own, saved in columns:
            self._history[:rows, own] = found[:rows, saved].to(self._history)
        self.steps = steps if columns else 0
        self._choose()


_used: list[DelayedScales] = []


def scales_in_use() -> DelayedScales:
    """Those of the step that runs."""
    assert _used, "products with delayed scales run within a step"
    return _used[-1]

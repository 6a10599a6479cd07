"""What a run of a step gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Result:
    """Outputs of a step (flat, in signature order), gradients by placeholder name of the local graph, and the losses.

    With stages in training there are only losses and new buffers among the outputs; others are None.
    """

    outputs: list[Any]
    gradients: dict[str, Tensor]
    losses: list[Tensor] = field(default_factory=list)


def copied(result: Result) -> Result:
    """The same in storages of its own: one launch for each dtype."""
    values = [*result.outputs, *result.gradients.values(), *result.losses]
    fresh = [torch.empty_like(x) if isinstance(x, Tensor) else x for x in values]
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for new, old in zip(fresh, values, strict=True):
        if isinstance(old, Tensor):
            targets, sources = by_dtype.setdefault(old.dtype, ([], []))
            targets.append(new)
            sources.append(old)
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources)
    count = len(result.outputs)
    gradients = dict(zip(result.gradients, fresh[count:], strict=False))
    return Result(fresh[:count], gradients, fresh[count + len(gradients) :])

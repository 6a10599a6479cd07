"""What a run of a step gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.adapters.foreach import copy_all


@dataclass
class Result:
    """Outputs of a step (flat, in signature order), gradients by placeholder name of the local graph, and the losses.

    With stages in training there are only losses and new buffers among the outputs; others are None.
    """

    outputs: list[Any]
    gradients: dict[str, Tensor]
    losses: list[Tensor] = field(default_factory=list)


def copied(result: Result) -> Result:
    """The same in storages of its own."""
    values = [*result.outputs, *result.gradients.values(), *result.losses]
    tensors = {i: x for i, x in enumerate(values) if isinstance(x, Tensor)}
    fresh: list[Any] = [torch.empty_like(tensors[i]) if i in tensors else x for i, x in enumerate(values)]
    copy_all([fresh[i] for i in tensors], list(tensors.values()))
    count = len(result.outputs)
    gradients = dict(zip(result.gradients, fresh[count:], strict=False))
    return Result(fresh[:count], gradients, fresh[count + len(gradients) :])

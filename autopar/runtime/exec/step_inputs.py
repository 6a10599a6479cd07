"""What a compiled model is fed with: from names of placeholders to this rank's values.

spec.kind       parameter, buffer, constant, seed    the value stored under the original name
                input                                the batch of this rank, or its microbatch
                microbatch                          the index, as a tensor
                total                                what the prologue summed over all microbatches
                present                             how many microbatches take part, of all replicas together
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.ir.placement import Placement, Shard
from autopar.steps.graphs import Compiled

SCALE = "loss scale"  # what gradients of losses start from
REPLICA_SHARD = "shard of a replica"  # which one of the batch of several replicas a step computes, from 0


class StepInputs:
    """Values by placeholder. ``specs``: placeholder -> InputSpec."""

    def __init__(self, compiled: Compiled, device: torch.device) -> None:
        self.specs = {spec.node: spec for spec in compiled.signature.inputs}
        self.microbatches = compiled.plan.options.microbatches
        self._inputs, self._device = compiled.plan.inputs, device

    @staticmethod
    def scale(dtype: torch.dtype) -> str:
        """The name of the gradient of a loss of some dtype."""
        return f"{SCALE}{str(dtype).removeprefix('torch.')}"

    def varies(self, name: str) -> bool:
        """Whether a placeholder takes another value in every microbatch."""
        spec = self.specs.get(name)
        if spec is None:
            return False
        cut = spec.kind == "input" and isinstance(self._cut(spec.name), Shard)
        return cut or spec.kind == "microbatch"

    def _cut(self, name: str) -> Placement | None:
        return self._inputs.get(name, {}).get("mb")

    def unsplit_name(self, name: str) -> str:
        """The name under which a placeholder's value is among ``values``; "" if it is made of them, or of none."""
        spec = self.specs.get(name)
        made = spec is None or spec.kind in ("total", "microbatch") or isinstance(self._cut(spec.name), Shard)
        return "" if made or spec is None else spec.name

    def value(self, name: str, values: Mapping[str, Tensor], microbatch: int) -> Any:
        """``values`` holds state by original name, inputs by path, and what the step made by node."""
        if name.startswith(SCALE):
            dtype, scale = getattr(torch, name.removeprefix(SCALE)), values.get(SCALE)
            return torch.ones((), dtype=dtype, device=self._device) if scale is None else scale.to(dtype)
        spec = self.specs.get(name)
        if spec is None or (spec.kind == "total" and name in values):
            return values[name]
        if spec.kind == "microbatch":
            first = int(values[REPLICA_SHARD]) * self.microbatches if REPLICA_SHARD in values else 0
            return torch.full((), first + microbatch, device=self._device)  # without a copy from the host
        value = values[spec.name]
        cut = self._cut(spec.name)
        if not isinstance(cut, Shard):  # the number of the microbatch is made above
            return value
        dim = cut.dim
        count = value.shape[dim] // self.microbatches
        piece = value.narrow(dim, microbatch * count, count)
        return piece.contiguous() if dim else piece  # graphs are made for contiguous inputs

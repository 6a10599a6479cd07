"""Batch norms with ``momentum=None``, whose running statistics are means over all batches.

torch reads the number of batches, to weigh the new one: 1 / float(num_batches_tracked). Here the weight stays a tensor.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def weigh_batches_as_tensors(replica: nn.Module) -> None:
    """Change the structure copy."""
    for module in replica.modules():
        own = isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward
        if own and module.momentum is None and module.num_batches_tracked is not None:
            module.__class__ = _cumulative(type(module))


@functools.cache
def _cumulative(kind: Any) -> Any:
    def forward(self: Any, input: Tensor) -> Tensor:
        if not (self.training and self.track_running_stats):
            found: Tensor = kind.forward(self, input)
            return found
        self._check_input_dim(input)
        self.num_batches_tracked.add_(1)
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        out = nn.functional.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        with torch.no_grad():
            weight = self.num_batches_tracked.double().reciprocal()
            for running, new in ((self.running_mean, mean), (self.running_var, variance)):
                running.copy_(running * (1 - weight).to(running.dtype) + new * weight.to(running.dtype))
        return out

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})

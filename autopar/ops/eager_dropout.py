"""An eager run whose dropout masks are those of `autopar::dropout`: so that it can be compared with a compiled run.

    with shared_dropout(seed): model(**batch)       the n-th dropout of the run draws the mask of site n

It works below autograd, where every dropout of torch asks for random bits: modules, functionals, the dropout inside
attention (its plain form), and whatever calls them. The n-th call in an eager run is the n-th site of the captured
graph, since capture runs the same code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.adapters.dispatch import DispatchMode
from autopar.ops.dropout import keep_mask

aten = torch.ops.aten


class _Masks(DispatchMode):
    """Answers requests for random bits; counts them in ``site``."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed, self.site = seed, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is aten.bernoulli_.float:
            x, keep = args[0], args[1] if len(args) > 1 else (kwargs or {}).get("p", 0.5)
            return x.copy_(self._mask(x, 1.0 - keep))
        if func is aten.native_dropout.default:  # the fused form on CUDA
            x, p, train = args
            mask = self._mask(x, p) if train or train is None else torch.ones_like(x, dtype=torch.bool)
            return x * mask * (1.0 / (1.0 - p) if train and p < 1 else 1.0), mask
        return func(*args, **(kwargs or {}))

    def _mask(self, x: Tensor, p: float) -> Tensor:
        mask = keep_mask(x.shape, torch.tensor(self.seed, device=x.device), p, self.site, [], [])
        self.site += 1
        return mask


@contextlib.contextmanager
def shared_dropout(seed: int) -> Iterator[_Masks]:
    """Within: dropouts draw from ``seed`` and their number. Around the forward of a model, not its backward."""
    with sdpa_kernel(SDPBackend.MATH), _Masks(seed) as masks:
        yield masks

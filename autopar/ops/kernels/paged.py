"""Kernels of `autopar::cached_attention`: a table from name to kernel; the first that applies is used.

varlen      CUDA: one call of torch's `varlen_attn`
rows        CPU: views of the pools, no copies of keys (`autopar.ops.kernels.paged_plan`)
gathered    any device: the pages of each request, copied into one tensor

with paged.using("gathered"): ...      # tests and benchmarks: this one, or an error
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from autopar.ops.kernels.paged_gathered import Gathered
from autopar.ops.kernels.paged_kernel import Paged, PagedKernel
from autopar.ops.kernels.paged_rows import Rows
from autopar.ops.kernels.paged_varlen import Varlen
from autopar.registry import Registry

__all__ = ["PAGED", "Paged", "PagedKernel", "forward", "using"]

PAGED: Registry[PagedKernel] = Registry("kernel of paged attention")  # in the order of preference
for _kernel in (Varlen(), Rows(), Gathered()):
    PAGED.add(_kernel.name, _kernel)

_forced: list[PagedKernel] = []


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Within: only this kernel. Raises ValueError for an unknown name, and where it does not apply."""
    _forced.append(PAGED[name])
    try:
        yield
    finally:
        _forced.pop()


def forward(q: Tensor, given: Paged) -> Tensor:
    """out of the first kernel that applies."""
    for kernel in _forced[-1:] or map(PAGED.__getitem__, PAGED):
        if kernel.applies(q, given):
            return kernel.forward(q, given)
    raise ValueError(
        f"cached_attention: kernel {_forced[-1].name!r} was asked for, but does not support q {list(q.shape)} of "
        f"{q.dtype} on {q.device.type} with these masks; leave the choice open or use 'gathered'"
    )

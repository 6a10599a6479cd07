"""Copies between the device and the host: `autopar::to_host`, `autopar::from_host`.

    F   h = to_host(x)        offloads what the backward needs of x to host memory; returned under the name host:x
    B   x = from_host(h)

`autopar.runtime.exec.lowering` starts a copy where its node stands, and waits for it elsewhere (`autopar.ir.waits`).
Compiled code calls the kernels below, which copy in stream order.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("autopar", "FRAGMENT")

_library.define("to_host(Tensor x) -> Tensor")
_library.define("from_host(Tensor x, Device? device=None) -> Tensor")


@torch.library.register_fake("autopar::to_host", lib=_library)
def _to_host(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu")


@torch.library.register_fake("autopar::from_host", lib=_library)
def _from_host(x: Tensor, device: torch.device | None = None) -> Tensor:
    return torch.empty_like(x, device=device or "cpu")


@torch.library.impl("autopar::to_host", "CompositeExplicitAutograd", lib=_library)
def _copy_to_host(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=x.is_cuda)


@torch.library.impl("autopar::from_host", "CompositeExplicitAutograd", lib=_library)
def _copy_from_host(x: Tensor, device: torch.device | None = None) -> Tensor:
    return torch.empty_like(x, device=device or "cpu").copy_(x, non_blocking=True)

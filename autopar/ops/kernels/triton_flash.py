"""Our own kernel: `autopar.ops.kernels.fused_attention`, tried after those of the chip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autopar.ops.kernels.chips import Chip
from autopar.ops.kernels.cuda import Fused
from autopar.ops.kernels.kernel import HALF, Grads
from autopar.ops.kernels.triton_module import module_that_runs
from autopar.ops.mask_spec import MaskSpec

_PLAIN = MaskSpec(None, None, None, None, None, True, 0, 0, 0, 1.0, 2.0, 0.0, 0, [], [], [])


class TritonFlash(Fused):
    """Three Triton kernels: softcap; causal, windows, chunks at any offset, padding, documents, any bool mask; GQA and
    widths up to 256 natively. No bias."""

    name = "triton_flash"
    dtypes = (*HALF, torch.float32)

    def applies(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> bool:
        real = type(q) in (Tensor, Parameter)  # and not a tensor without data
        return real and super().applies(q, k, v, facts) and _module(q.device) is not None

    def widths(self, q: Tensor, v: Tensor, chip: Chip) -> tuple[int, int] | None:
        return (q.shape[-1], v.shape[-1]) if max(q.shape[-1], v.shape[-1]) <= 256 else None

    def masks(self, q: Tensor, k: Tensor, facts: MaskSpec, chip: Chip) -> bool:
        return facts.bias is None and facts.lift is None and (facts.offset >= 0 or not facts.chunk)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> tuple[Tensor, Tensor]:
        out, lse = _module(q.device).attended(q, k, v, facts)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: MaskSpec, bias: bool
    ) -> Grads:
        delta = (grad.float() * out.float()).sum(-1)
        return *_module(q.device).differentiated(grad.to(q.dtype), q, k, v, lse, delta, facts), None


def _module(device: torch.device) -> Any:
    """`autopar.ops.kernels.fused_attention`, if it runs on the device; else None."""
    return module_that_runs(
        "autopar.ops.kernels.fused_attention",
        device,
        _try,
        "a softcap is computed in plain products, all scores at once",
    )


def _try(module: Any, device: torch.device) -> None:
    x = torch.zeros(1, 1, 1, 16, dtype=torch.float16, device=device)
    module.attended(x, x, x, _PLAIN)

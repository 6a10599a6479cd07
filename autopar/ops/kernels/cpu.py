"""torch's flash attention on CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autopar.ops.kernels.kernel import NEVER, Grads, Kernel, empty_rows, four_dims, has_size

if TYPE_CHECKING:
    from autopar.ops.mask_spec import MaskSpec

_aten = torch.ops.aten


class CpuFlash(Kernel):
    """`_scaled_dot_product_flash_attention_for_cpu`: all float types, GQA, any mask as an additive one of q's dtype; no
    softcap, no dropout, value width = width. Its causal triangle begins at the first key. In rows without keys it gives
    lse 0, where ours is -inf."""

    name = "cpu_flash"

    def applies(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> bool:
        plain = not facts.softcap and not facts.dropout
        return q.device.type == "cpu" and plain and q.shape[-1] == v.shape[-1] and has_size(q, k)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> tuple[Tensor, Tensor]:
        mask, causal = _mask(q, k, facts)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=facts.scale
        )
        return out, lse if mask is None else lse.masked_fill(empty_rows(mask, lse), NEVER)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: MaskSpec, bias: bool
    ) -> Grads:
        mask, causal = _mask(q, k, facts)
        grad, out = grad.to(q.dtype), out.to(q.dtype)
        lse = lse.masked_fill(lse == NEVER, 0.0).contiguous()  # exp(-inf - 0) = 0 in rows where nothing is allowed
        to_q, to_k, to_v = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=facts.scale
        )
        return to_q, to_k, to_v, None


def _mask(q: Tensor, k: Tensor, facts: MaskSpec) -> tuple[Tensor | None, bool]:
    """(additive mask or None, the kernel's causal flag)."""
    if facts.only_causal and not (facts.causal and facts.offset):
        return None, facts.causal
    mask = four_dims(facts.additive_mask(q, k.shape[2]))
    return mask.expand(*mask.shape[:2], q.shape[2], k.shape[2]), False

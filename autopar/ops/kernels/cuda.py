"""Fused attention on CUDA: the flash-attn package, and torch's cuDNN, flash and memory-efficient operators.

    kernel           dtypes        mask                                          head width          GQA
    flash_attn       half          causal, window, softcap; last on last         x8, <= 256          native
    cudnn            half          causal of a square                            x8, <= 128          expanded
    cuda_flash       half          causal; last on last                          x8, <= 256          expanded
    cuda_efficient   half, fp32    anything as an additive mask                  x8 half, x4 fp32    expanded

"Last on last": the kernel's triangle ends where the last query stands at the last key. Each docstring says what its
operator needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.adapters import flash_attn
from autopar.ops.kernels.kernel import (
    HALF,
    NEVER,
    Grads,
    Kernel,
    empty_rows,
    expand_heads,
    four_dims,
    has_size,
    unexpand,
)

if TYPE_CHECKING:
    from autopar.ops.facts import Facts

_aten = torch.ops.aten


def _on_cuda(q: Tensor) -> bool:
    return q.is_cuda


def _modern(q: Tensor) -> bool:
    """Hopper or later, with cuDNN."""
    return torch.cuda.get_device_capability(q.device) >= (9, 0) and torch.backends.cudnn.is_available()


def _plain(q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> bool:
    """On CUDA, without dropout, and not empty."""
    return _on_cuda(q) and not facts.dropout and has_size(q, k, v)


def _half(q: Tensor, v: Tensor, widest: int) -> bool:
    """Half types with a width that half-type kernels take, the same for q and v."""
    width = q.shape[-1]
    return q.dtype in HALF and width == v.shape[-1] and width % 8 == 0 and width <= widest


def _last_on_last(q: Tensor, k: Tensor, facts: Facts) -> bool:
    """The last query stands at the last key, and no row is left without keys."""
    return facts.offset == k.shape[2] - q.shape[2] >= 0


class FlashAttn(Kernel):
    """The ``flash-attn`` package (extra ``flash``), if it is installed: tensors [B, S, H, D], GQA as it is, softcap,
    and windows |i - j| < w as (w - 1, w - 1) around the diagonal that ends at the last key."""

    name = "flash_attn"

    def applies(self, q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> bool:
        if not (_plain(q, k, v, facts) and _half(q, v, 256) and facts.by_position_alone and not facts.chunk):
            return False
        placed = _last_on_last(q, k, facts) or not (facts.causal or facts.window)
        return placed and flash_attn.installed()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> tuple[Tensor, Tensor]:
        return flash_attn.flash_forward(q, k, v, facts.scale, facts.causal, facts.window, facts.softcap)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: Facts, bias: bool
    ) -> Grads:
        grad, out = grad.to(q.dtype), out.to(q.dtype)
        known = (facts.scale, facts.causal, facts.window, facts.softcap)
        return *flash_attn.flash_backward(grad, q, k, v, out, lse.contiguous(), *known), None


class Cudnn(Kernel):
    """`_scaled_dot_product_cudnn_attention`: the causal flag needs as many queries as keys; lse comes and goes as
    [B, H, S, 1]. On Hopper and later, where it is the fastest of torch's (torch itself prefers it there)."""

    name = "cudnn"

    def applies(self, q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> bool:
        if not (_plain(q, k, v, facts) and _half(q, v, 128) and facts.only_causal and not facts.softcap):
            return False
        square = q.shape[2] == k.shape[2] and not facts.offset
        return (square or not facts.causal) and _modern(q)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> tuple[Tensor, Tensor]:
        k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
        out, lse = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, facts.causal, False, scale=facts.scale
        )[:2]
        return out, lse.reshape(q.shape[:3])

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: Facts, bias: bool
    ) -> Grads:
        heads = k.shape[1]
        k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        to_q, to_k, to_v = _aten._scaled_dot_product_cudnn_attention_backward(
            grad.to(q.dtype), q, k, v, out.to(q.dtype), lse.unsqueeze(-1).contiguous(), seed, seed, None, None, None,
            q.shape[2], k.shape[2], 0.0, facts.causal, scale=facts.scale,
        )  # fmt: skip
        return to_q, unexpand(to_k, heads), unexpand(to_v, heads), None


class CudaFlash(Kernel):
    """`_scaled_dot_product_flash_attention`: the causal triangle ends at the last key."""

    name = "cuda_flash"

    def applies(self, q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> bool:
        if not (_plain(q, k, v, facts) and _half(q, v, 256) and facts.only_causal and not facts.softcap):
            return False
        return not facts.causal or _last_on_last(q, k, facts)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> tuple[Tensor, Tensor]:
        k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, facts.causal, False, scale=facts.scale)[:2]
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: Facts, bias: bool
    ) -> Grads:
        heads = k.shape[1]
        k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
        no_rng = torch.empty(2, dtype=torch.uint64, device=q.device)
        to_q, to_k, to_v = _aten._scaled_dot_product_flash_attention_backward(
            grad.to(q.dtype), q, k, v, out.to(q.dtype), lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0,
            facts.causal, no_rng, no_rng.new_empty(()), scale=facts.scale,
        )  # fmt: skip
        return to_q, unexpand(to_k, heads), unexpand(to_v, heads), None


class CudaEfficient(Kernel):
    """`_scaled_dot_product_efficient_attention`: its causal triangle begins at the first key. An additive mask has
    q's dtype and all four dims, and a last stride that is a multiple of 16 entries. lse is as long as the next multiple
    of 32, and infinite behind the last row, which makes these rows nothing in the backward."""

    name = "cuda_efficient"

    def applies(self, q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> bool:
        if not _plain(q, k, v, facts) or facts.softcap or q.dtype not in (*HALF, torch.float32):
            return False
        unit = 8 if q.dtype in HALF else 4
        return q.shape[-1] % unit == 0 and v.shape[-1] % unit == 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> tuple[Tensor, Tensor]:
        mask, causal = _aligned_mask(q, k, facts)
        k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
        out, lse = _aten._scaled_dot_product_efficient_attention(
            q, k, v, mask, True, 0.0, causal, scale=facts.scale
        )[:2]  # fmt: skip
        lse = lse[..., : q.shape[2]]
        if mask is None:
            return out, lse
        empty = empty_rows(mask, lse)
        return out.masked_fill(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, NEVER)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: Facts, bias: bool
    ) -> Grads:
        heads = k.shape[1]
        mask, causal = _aligned_mask(q, k, facts)
        k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
        lse = lse.masked_fill(lse == NEVER, float("inf"))  # exp(-inf - inf) = 0 in rows where nothing is allowed
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        to_q, to_k, to_v, _ = _aten._scaled_dot_product_efficient_attention_backward(
            grad.to(q.dtype), q, k, v, mask, out.to(q.dtype), lse, seed, seed, 0.0, [True, True, True, False], causal,
            scale=facts.scale,
        )  # fmt: skip
        return to_q, unexpand(to_k, heads), unexpand(to_v, heads), None


def _aligned_mask(q: Tensor, k: Tensor, facts: Facts) -> tuple[Tensor | None, bool]:
    """(additive mask [B, Hq, Sq, Sk] whose rows begin at multiples of 16 entries or None, the causal flag)."""
    if facts.only_causal and not (facts.causal and facts.offset):
        return None, facts.causal
    mask = four_dims(facts.additive_mask(q, k.shape[2]))
    keys = k.shape[2]
    mask = mask.expand(*mask.shape[:3], keys)
    mask = F.pad(mask, (0, -keys % 16))[..., :keys] if keys % 16 else mask.contiguous()
    return mask.expand(*q.shape[:3], keys), False

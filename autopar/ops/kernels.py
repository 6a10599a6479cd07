"""torch's flash attention kernels behind `autopar::attention`: when they apply, and what has to be put right.

    CPU   `_scaled_dot_product_flash_attention_for_cpu`: all float types, GQA, additive mask of q's dtype. A fully
          masked row gives out 0 and lse 0; ours is -inf.
    CUDA  `_scaled_dot_product_flash_attention`: half types, no mask beside causal where the last query stands at the
          last key (the kernel's triangle), head dims that are multiples of 8 and at most 256; key heads are expanded.

Sinks are merged afterwards, as one further partial result with value zero and log-sum-exp = sink:
out' = out * exp(lse - lse'), lse' = log(exp(lse) + exp(sink)). The backward needs only out' and lse'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from autopar.ops.attention import Facts

_aten = torch.ops.aten


def applies(q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> bool:
    """Whether a flash kernel of q's device computes this."""
    if facts.softcap or facts.dropout or q.shape[-1] != v.shape[-1] or 0 in (*q.shape, *k.shape):
        return False
    if q.is_cuda:
        half = q.dtype in (torch.float16, torch.bfloat16)
        return half and _flag_is_enough(q, k, facts) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.device.type == "cpu"


def _flag_is_enough(q: Tensor, k: Tensor, facts: Facts) -> bool:
    """Whether the kernel's causal flag says all of the mask: its triangle begins where the queries do."""
    triangle = k.shape[2] - q.shape[2] if q.is_cuda else 0
    return facts.only_causal and (not facts.causal or facts.offset == triangle)


def _mask(q: Tensor, k: Tensor, facts: Facts) -> tuple[Tensor | None, bool]:
    """(additive mask or None, the kernel's causal flag)."""
    if _flag_is_enough(q, k, facts):
        return None, facts.causal
    mask = facts.additive_mask(q, k.shape[2])
    if mask.dim() != 4:
        mask = mask.expand(1, 1, q.shape[2], k.shape[2])
    return mask, False


def _expand(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _unexpand(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(2)


def forward(q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq, D] and lse [B, Hq, Sq], sinks included."""
    mask, causal = _mask(q, k, facts)
    if q.is_cuda:
        k, v = _expand(k, q.shape[1]), _expand(v, q.shape[1])
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=facts.scale)[:2]
    else:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=facts.scale
        )
    if mask is not None:
        empty = (mask == float("-inf")).all(-1).expand(lse.shape)
        lse = lse.masked_fill(empty, float("-inf"))
    if facts.sinks is None:
        return out, lse
    merged = torch.logaddexp(lse, facts.sinks.to(lse.dtype)[:, None])
    return out * torch.exp(lse - merged).unsqueeze(-1).to(out.dtype), merged


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: Facts
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    mask, causal = _mask(q, k, facts)
    lse = lse.masked_fill(lse == float("-inf"), 0.0)  # exp(-inf - 0) = 0 in rows where nothing is allowed
    if not q.is_cuda:
        to_q, to_k, to_v = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=facts.scale
        )
        return to_q, to_k, to_v
    heads = k.shape[1]
    k, v = _expand(k, q.shape[1]), _expand(v, q.shape[1])
    no_rng = torch.empty(2, dtype=torch.uint64, device=q.device)
    to_q, to_k, to_v = _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, no_rng, no_rng.new_empty(()),
        scale=facts.scale,
    )  # fmt: skip
    return to_q, _unexpand(to_k, heads), _unexpand(to_v, heads)

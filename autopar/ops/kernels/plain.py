"""Attention by plain matrix products: any dtype, any mask, all scores at once; and its shapes alone, on meta."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autopar.ops.kernels.kernel import HUGE, NEVER, Grads, Kernel, sum_to, wide

if TYPE_CHECKING:
    from autopar.ops.mask_spec import MaskSpec


from typing import TYPE_CHECKING

from autopar.ops.kernels.kernel import empty_rows, four_dims, has_size

if TYPE_CHECKING:
    from autopar.ops.mask_spec import MaskSpec


class _PlainScores:
    """Scores [B, Hq, Sq, Sk], query heads of one key head stacked so that k and v stay unexpanded."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> None:
        self.facts = facts
        self.wide = wide(q.dtype)
        self.q, self.k, self.v = q.to(self.wide), k.to(self.wide), v.to(self.wide)
        self.shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        raw = self.product(self.q, self.k.transpose(-1, -2)) * facts.scale
        self.tanh = torch.tanh(raw / facts.softcap) if facts.softcap else None
        scores = raw if self.tanh is None else self.tanh * facts.softcap
        if facts.bias is not None:
            scores = scores + facts.bias.to(self.wide)
        if facts.lift is not None:
            scores = scores - facts.lift.to(self.wide)
        allowed = facts.allowed(self.shape[2], self.shape[3], q.device)
        self.scores = scores if allowed is None else scores.masked_fill(~allowed, NEVER)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """left [B, Hq, S, *] @ right [B, Hk, *, *] with the heads of one group stacked along S."""
        batch, heads, size, inner = left.shape
        groups = right.shape[1]
        stacked = left.reshape(batch, groups, heads // groups * size, inner) @ right
        return stacked.reshape(batch, heads, size, right.shape[-1])

    def reduce(self, left: Tensor, right: Tensor) -> Tensor:
        """left' @ right, summed over the query heads of a key head: [B, Hk, *, *]."""
        batch, heads, size, _ = left.shape
        groups = self.k.shape[1]
        left, right = (x.reshape(batch, groups, heads // groups * size, x.shape[-1]) for x in (left, right))
        return left.transpose(-1, -2) @ right

    def probabilities(self, lse: Tensor) -> Tensor:
        """exp(scores - lse). Where a bias blocks every key by a large number, lse is that number, and the keys' scores
        are lost in rounding: those rows are divided by their sum."""
        safe = lse.masked_fill(lse == NEVER, 0.0).unsqueeze(-1)
        out = torch.exp(self.scores - safe)
        return out if self.facts.bias is None else out / out.sum(-1, keepdim=True).masked_fill_(safe > HUGE, 1.0)

    def kept(self) -> Tensor | None:
        """The factors that dropout multiplies the probabilities by."""
        p = self.facts.dropout
        if not p:
            return None
        keep = self.facts.keep(self.shape).to(self.wide)
        return keep / (1.0 - p) if p < 1 else torch.zeros_like(keep)


class Math(Kernel):
    """Matrix products, in float32 or float64. Allocates several tensors [B, Hq, Sq, Sk]."""

    name = "math"
    bias_gradient = True

    def applies(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> bool:
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> tuple[Tensor, Tensor]:
        scores = _PlainScores(q, k, v, facts)
        lse = torch.logsumexp(scores.scores, -1)
        weights, kept = scores.probabilities(lse), scores.kept()
        return scores.product(weights if kept is None else weights * kept, scores.v), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: MaskSpec, bias: bool
    ) -> Grads:
        scores = _PlainScores(q, k, v, facts)
        weights, kept = scores.probabilities(lse), scores.kept()
        grad, out = grad.to(scores.wide), out.to(scores.wide)
        to_v = scores.reduce(weights if kept is None else weights * kept, grad)
        to_weights = scores.product(grad, scores.v.transpose(-1, -2))
        if kept is not None:
            to_weights = to_weights * kept
        to_scores = weights * (to_weights - (grad * out).sum(-1, keepdim=True))
        to_bias = sum_to(to_scores, facts.bias) if bias and facts.bias is not None else None
        if scores.tanh is not None:
            to_scores = to_scores * (1 - scores.tanh.square())
        to_scores = to_scores * facts.scale
        return scores.product(to_scores, scores.k), scores.reduce(to_scores, scores.q), to_v, to_bias


class Meta(Kernel):
    """Shapes and dtypes, for tensors on the meta device."""

    name = "meta"
    bias_gradient = True

    def applies(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> bool:
        return q.is_meta

    def forward(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> tuple[Tensor, Tensor]:
        return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: MaskSpec, bias: bool
    ) -> Grads:
        to_bias = facts.bias.new_empty(facts.bias.shape) if bias and facts.bias is not None else None
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), to_bias


# --- torch's kernels for CPUs --------------------------------------------------------------------------

_aten = torch.ops.aten


class CpuFlash(Kernel):
    """`_scaled_dot_product_flash_attention_for_cpu`: all float types, GQA, any mask as an additive one of q's dtype; no
    softcap, no dropout, value width = width. Its causal triangle begins at the first key. In rows without keys it
    returns lse 0, where ours is -inf."""

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

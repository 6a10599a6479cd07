"""`autopar::attention`: softmax(q k' * scale + mask) v as one operator that knows *facts* about its mask.

Causal, window, chunk, padding and documents are arguments, so that the sequence can be cut over ranks without anybody
reading an [S, S] tensor. Key/value heads stay unexpanded (GQA). The log-sum-exp is returned: it is what the backward
and every merge of partial results needs.

Scores, in this order: s = scale * q.k; softcap: s = cap * tanh(s / cap); s += bias; masked entries = -inf. Sinks are
one further logit per head, in the denominator only. A row without any allowed key gives out = 0 and lse = -inf (its
sink, if there is one). Half types accumulate in float32.

What computes is the first of `autopar.ops.kernels` that applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ops import kernels
from autopar.ops.dropout import keep_mask
from autopar.ops.kernels import wide

FACTS = (
    "Tensor? bias, Tensor? key_mask, Tensor? segments, Tensor? sinks, Tensor? seed, bool causal, SymInt window, "
    "SymInt chunk, SymInt offset, float scale, float softcap, float dropout, int site, Tensor[] index, SymInt[] shape"
)


@dataclass(frozen=True)
class Facts:
    """The arguments of `autopar::attention` behind q, k, v, in the order of its schema.

    bias      additive, float, differentiable, broadcastable to [B, Hq, Sq, Sk]
    key_mask  bool [B, Sk], True = may be attended (padding)
    segments  int [B, Sk]: packed documents; attend within equal numbers only (query i is in that of key i + offset)
    sinks     [Hq]: one logit per head that takes probability and gives nothing
    seed, dropout, site, index, shape   of the dropout on the probabilities, as in `autopar::dropout`
    causal    key j <= query i
    window    0, or |i - j| < window
    chunk     0, or i // chunk == j // chunk
    offset    where the queries stand among the keys: row r is query i = r + offset (0: top-left aligned)
    softcap   0, or the cap

    mask and lift are no arguments of the operator: a further mask for a block of a larger attention, and what is taken
    off the scores of each row so that numbers remain (`autopar.ops.context`).
    """

    bias: Tensor | None
    key_mask: Tensor | None
    segments: Tensor | None
    sinks: Tensor | None
    seed: Tensor | None
    causal: bool
    window: int
    chunk: int
    offset: int
    scale: float
    softcap: float
    dropout: float
    site: int
    index: Sequence[Tensor]
    shape: Sequence[int]
    mask: Tensor | None = None  # bool [B|1, 1, Sq, Sk], True = attend
    lift: Tensor | None = None  # [B|1, Hq|1, Sq|1, 1]

    def allowed(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Bool mask [B|1, 1, Sq, Sk], True = attend; None if everything is allowed."""
        i = torch.arange(self.offset, self.offset + queries, device=device).unsqueeze(-1)
        j = torch.arange(keys, device=device)
        terms: list[Tensor] = []
        if self.causal:
            terms.append(j <= i)
        if self.window:
            terms.append((i - j < self.window) & (j - i < self.window))
        if self.chunk:
            terms.append(i // self.chunk == j // self.chunk)
        if self.key_mask is not None:
            terms.append(self.key_mask.bool()[:, None, None, :])
        if self.segments is not None:
            mine = self.segments.narrow(-1, self.offset, queries)
            terms.append((mine.unsqueeze(-1) == self.segments.unsqueeze(-2)).unsqueeze(1))
        if self.mask is not None:
            terms.append(self.mask)
        if not terms:
            return None
        out = terms[0]
        for term in terms[1:]:
            out = out & term
        return out if out.dim() == 4 else out[None, None]

    @property
    def by_position_alone(self) -> bool:
        """Causal, window and chunk say all of the mask."""
        return all(m is None for m in (self.bias, self.key_mask, self.segments, self.mask))

    @property
    def only_causal(self) -> bool:
        """No mask beside the triangle, so that a kernel's own causal flag says it all."""
        return self.by_position_alone and not self.window and not self.chunk

    def additive_mask(self, q: Tensor, keys: int) -> Tensor:
        """Bias and mask as one float mask of q's dtype."""
        allowed = self.allowed(q.shape[2], keys, q.device)
        mask = self.bias.to(q.dtype) if self.bias is not None else q.new_zeros(())
        if allowed is not None:
            mask = torch.where(allowed, mask, float("-inf"))
        return mask

    def keep(self, scores_shape: Sequence[int]) -> Tensor:
        """Dropout mask of the probabilities [B, Hq, Sq, Sk]."""
        if self.seed is None:
            raise ValueError(
                f"attention: dropout of {self.dropout} needs a seed, found none; normalise the graph, which adds the "
                "seed input, or capture with train=False"
            )
        return keep_mask(scores_shape, self.seed, self.dropout, self.site, self.index, self.shape)


def rows_first(x: Tensor) -> Tensor:
    """[B, H, S, D] stored as [B, S, H, D]: joining the heads afterwards is a view."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@torch.library.custom_op(
    "autopar::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {FACTS}) -> (Tensor out, Tensor lse)",
)
def attention(q: Tensor, k: Tensor, v: Tensor, *facts: Any) -> tuple[Tensor, Tensor]:
    """q [B, Hq, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv] -> out [B, Hq, Sq, Dv], lse [B, Hq, Sq].

    Hq is a multiple of Hk. ``out`` is stored heads-inside ([B, Sq, Hq, Dv] contiguous). ``lse`` is float32, or
    float64 for float64 inputs, and not differentiable. The rest is `Facts`.
    """
    known = Facts(*facts)
    if q.device.type != "cpu":  # there `kernels.backward` looks for them
        kernels.note_blocked_rows(known.bias)
    out, lse = kernels.forward(q, k, v, known)
    return rows_first(out.to(q.dtype)), lse.contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *facts: Any) -> tuple[Tensor, Tensor]:
    batch, heads, size, _ = q.shape
    if heads % k.shape[1]:
        raise ValueError(f"attention: {heads} query heads need a divisor as key heads, found {k.shape[1]}")
    out = q.new_empty(batch, size, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, size, dtype=wide(q.dtype))


@torch.library.custom_op(
    "autopar::attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {FACTS}, bool bias_needs_grad) -> "
    "(Tensor q_grad, Tensor k_grad, Tensor v_grad, Tensor bias_grad, Tensor sinks_grad)",
)
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *facts: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, bias and sinks; the last two are empty where there is nothing to differentiate.

    ``out`` and ``lse`` may be those of a larger attention of which k and v are a part (merged results): with
    p = exp(s - lse) and delta = rowsum(grad * out) each part's gradient is exact on its own.
    """
    *rest, bias_needs_grad = facts
    known = Facts(*rest)
    to_sinks = sinks_grad(grad, out, lse, known)
    bias = known.bias if bias_needs_grad else None
    to_q, to_k, to_v, to_bias = kernels.backward(grad, q, k, v, out, lse, known, bias is not None)
    grads = (rows_first(g.to(x.dtype)) for g, x in ((to_q, q), (to_k, k), (to_v, v)))
    if bias is None or to_bias is None:
        return *grads, q.new_empty(0), to_sinks  # type: ignore[return-value]
    return *grads, to_bias.to(bias.dtype).contiguous(), to_sinks  # type: ignore[return-value]


def sinks_grad(grad: Tensor, out: Tensor, lse: Tensor, facts: Facts) -> Tensor:
    """-sum over rows of p(sink) * rowsum(grad * out): a sink's value is zero, so only the denominator feels it."""
    if facts.sinks is None:
        return grad.new_empty(0)
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(torch.exp(facts.sinks.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2)).to(facts.sinks.dtype)


@attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *facts: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *rest, bias_needs_grad = facts
    known = Facts(*rest)
    grads = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))
    to_bias = known.bias.new_empty(known.bias.shape) if bias_needs_grad and known.bias is not None else q.new_empty(0)
    to_sinks = known.sinks.new_empty(known.sinks.shape) if known.sinks is not None else grad.new_empty(0)
    return *grads, to_bias, to_sinks  # type: ignore[return-value]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, key_mask, segments, sinks, seed, *scalars, index, ctx.shape = inputs
    ctx.scalars, ctx.indices = scalars, len(index)
    ctx.save_for_backward(q, k, v, *output, bias, key_mask, segments, sinks, seed, *index)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_lse: None) -> tuple[Any, ...]:
    # autograd wants the structure of the inputs back, in which an empty list of ints counts as a list
    nothing = (None,) * (5 + len(ctx.scalars)) + ([None] * ctx.indices, None if ctx.shape else [])
    if grad is None:
        return None, None, None, *nothing
    saved = ctx.saved_tensors
    tensors, index = saved[:10], list(saved[10:])
    bias_needs_grad = ctx.needs_input_grad[3]
    to_q, to_k, to_v, to_bias, to_sinks = torch.ops.autopar.attention_backward(
        grad, *tensors, *ctx.scalars, index, ctx.shape, bias_needs_grad
    )
    bias = to_bias if bias_needs_grad else None
    sinks = to_sinks if ctx.needs_input_grad[6] else None
    return to_q, to_k, to_v, bias, None, None, sinks, *nothing[4:]


attention.register_autograd(_backward, setup_context=_setup)

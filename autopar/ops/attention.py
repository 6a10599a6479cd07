"""`autopar::attention`: softmax(q k' * scale + mask) v as one operator whose mask is given by arguments.

Causal, window, chunk, padding and documents are arguments, so that the sequence can be sharded without reading an
[S, S] tensor. Key/value heads stay unexpanded (GQA). The log-sum-exp is returned: the backward and every merge of
partial results need it.

Scores, in this order: s = scale * q.k; softcap: s = cap * tanh(s / cap); s += bias; masked entries = -inf. Sinks are
one further logit per head, in the denominator only. A row without any allowed key returns out = 0 and lse = -inf (its
sink, if there is one). Half types accumulate in float32.

The first of `autopar.ops.kernels` that applies computes it. For a CPU a compiler traces that kernel, where nothing in
it depends on values: it fuses the softcap and the masks of plain products, and calls torch's kernel without Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops import kernels
from autopar.ops.declare import operator
from autopar.ops.kernels import wide
from autopar.ops.mask_spec import FACTS, MaskSpec


def rows_first(x: Tensor) -> Tensor:
    """[B, H, S, D] stored as [B, S, H, D]: joining the heads afterwards is a view."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _traceable(q: Tensor, facts: MaskSpec) -> bool:
    """Whether a compiler may trace the kernel: on a CPU, and no choice by values, no random bits and no documents."""
    return q.device.type == "cpu" and facts.bias is None and facts.segments is None and not facts.dropout


def _traced(q: Tensor, k: Tensor, v: Tensor, *facts: Any) -> Any:
    known = MaskSpec(*facts)
    return _computed(q, k, v, known) if _traceable(q, known) else NotImplemented


def _computed(q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> tuple[Tensor, Tensor]:
    out, lse = kernels.forward(q, k, v, facts)
    return rows_first(out.to(q.dtype)), lse.contiguous()


@operator(f"(Tensor q, Tensor k, Tensor v, {FACTS}) -> (Tensor out, Tensor lse)", compiled=_traced)
def attention(q: Tensor, k: Tensor, v: Tensor, *facts: Any) -> tuple[Tensor, Tensor]:
    """q [B, Hq, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv] -> out [B, Hq, Sq, Dv], lse [B, Hq, Sq].

    Hq is a multiple of Hk. ``out`` is stored heads-inside ([B, Sq, Hq, Dv] contiguous). ``lse`` is float32, or
    float64 for float64 inputs, and not differentiable. The rest is `MaskSpec`.
    """
    known = MaskSpec(*facts)
    if q.device.type != "cpu":  # otherwise `kernels.backward` looks for them
        kernels.note_blocked_rows(known.bias)
    return _computed(q, k, v, known)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *facts: Any) -> tuple[Tensor, Tensor]:
    batch, heads, size, _ = q.shape
    if heads % k.shape[1]:
        raise ValueError(f"attention: {heads} query heads need key heads that divide them, found {k.shape[1]}")
    bias, scores = MaskSpec(*facts).bias, (batch, heads, size, k.shape[2])
    if bias is not None and (bias.dim() != 4 or any(n not in (1, m) for n, m in zip(bias.shape, scores))):
        raise ValueError(f"attention: a bias needs {list(scores)}, or 1 for any of them, found {list(bias.shape)}")
    out = q.new_empty(batch, size, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, size, dtype=wide(q.dtype))


def _traced_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *facts: Any) -> Any:
    return _gradients(grad, q, k, v, out, lse, *facts) if _traceable(q, MaskSpec(*facts[:-1])) else NotImplemented


@operator(
    f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {FACTS}, bool bias_needs_grad) -> "
    "(Tensor q_grad, Tensor k_grad, Tensor v_grad, Tensor bias_grad, Tensor sinks_grad)",
    compiled=_traced_backward,
)
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *facts: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, bias and sinks; the last two are empty if there is nothing to differentiate.

    ``out`` and ``lse`` may be those of a larger attention, with more keys and values (merged results): with
    p = exp(s - lse) and delta = rowsum(grad * out) the gradient is exact for each subset of keys.
    """
    return _gradients(grad, q, k, v, out, lse, *facts)


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *facts: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *rest, bias_needs_grad = facts
    known = MaskSpec(*rest)
    to_sinks = sinks_grad(grad, out, lse, known)
    bias = known.bias if bias_needs_grad else None
    to_q, to_k, to_v, to_bias = kernels.backward(grad, q, k, v, out, lse, known, bias is not None)
    grads = (rows_first(g.to(x.dtype)) for g, x in ((to_q, q), (to_k, k), (to_v, v)))
    if bias is None or to_bias is None:
        return *grads, q.new_empty(0), to_sinks  # type: ignore[return-value]
    return *grads, to_bias.to(bias.dtype).contiguous(), to_sinks  # type: ignore[return-value]


def sinks_grad(grad: Tensor, out: Tensor, lse: Tensor, facts: MaskSpec) -> Tensor:
    """-sum over rows of p(sink) * rowsum(grad * out): a sink's value is zero, so it only enters the denominator."""
    if facts.sinks is None:
        return grad.new_empty(0)
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(torch.exp(facts.sinks.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2)).to(facts.sinks.dtype)


def fake_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, known: MaskSpec, bias_needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Fake results of `attention_backward`."""
    grads = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))
    to_bias = known.bias.new_empty(known.bias.shape) if bias_needs_grad and known.bias is not None else q.new_empty(0)
    to_sinks = known.sinks.new_empty(known.sinks.shape) if known.sinks is not None else grad.new_empty(0)
    return *grads, to_bias, to_sinks  # type: ignore[return-value]


@attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *facts: Any) -> tuple[Tensor, ...]:
    return fake_gradients(grad, q, k, v, MaskSpec(*facts[:-1]), facts[-1])


_OPTIONAL = 5  # bias, key_mask, segments, sinks, seed


def register_backward(name: str, further: int = 0, lib: Any = None) -> None:
    """The backward of an attention is the operator ``<name>_backward``. ``further``: number of arguments of both after
    those of `MaskSpec`."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *rest = inputs
        end = len(rest) - further
        tensors, (*ctx.scalars, index, ctx.shape, ctx.documents) = rest[:_OPTIONAL], rest[_OPTIONAL:end]
        ctx.how = rest[end:]
        ctx.indices = len(index)
        ctx.save_for_backward(q, k, v, *output, *tensors, *index)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor | None, grad_lse: None) -> tuple[Any, ...]:
        # autograd wants the structure of the inputs back, in which an empty list of ints counts as a list
        lists = (ctx.shape, ctx.documents, *ctx.how)
        rest: list[Any] = [[] if isinstance(x, (list, tuple)) and not x else None for x in lists]
        nothing = [*[None] * len(ctx.scalars), [None] * ctx.indices, *rest]
        if grad is None:
            return (*[None] * (3 + _OPTIONAL), *nothing)
        saved = ctx.saved_tensors
        tensors, index = saved[: 5 + _OPTIONAL], list(saved[5 + _OPTIONAL :])
        needs_bias, needs_sinks = ctx.needs_input_grad[3], ctx.needs_input_grad[6]
        to_q, to_k, to_v, to_bias, to_sinks = getattr(torch.ops.autopar, f"{name}_backward")(
            grad, *tensors, *ctx.scalars, index, *lists, needs_bias
        )
        optional = (to_bias if needs_bias else None, None, None, to_sinks if needs_sinks else None, None)
        return (to_q, to_k, to_v, *optional, *nothing)

    torch.library.register_autograd(f"autopar::{name}", backward, setup_context=setup, lib=lib)


register_backward("attention")

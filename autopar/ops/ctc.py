"""`autopar::ctc_loss`: connectionist temporal classification, one loss per example.

torch's own operator allocates a tensor whose size depends on the lengths, which static shapes cannot express. Here it
is recomputed in the backward. What mixes examples (means) is left outside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.declare import operator

_INPUTS = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity"


@operator(f"({_INPUTS}) -> Tensor", lambda log_probs, *_: log_probs.new_empty(log_probs.shape[1]))
def ctc_loss(log_probs: Tensor, targets: Tensor, *how: Any) -> Tensor:
    """log_probs [T, N, C], targets [N, S] (or those of all examples concatenated), lengths [N] -> loss [N].

    An example whose targets do not fit into its inputs has an infinite loss, or 0 with ``zero_infinity``.
    """
    *_, zero_infinity = how
    loss: Tensor = torch.ops.aten._ctc_loss.Tensor(log_probs, targets, *how)[0]
    return loss.masked_fill(loss == float("inf"), 0.0) if zero_infinity else loss


@operator(
    f"(Tensor grad, {_INPUTS}) -> Tensor",
    lambda grad, log_probs, *_: torch.empty_like(log_probs, memory_format=torch.contiguous_format),
)
def ctc_loss_backward(grad: Tensor, log_probs: Tensor, targets: Tensor, *how: Any) -> Tensor:
    """grad [N] of the losses -> gradient of log_probs [T, N, C]."""
    loss, alpha = torch.ops.aten._ctc_loss.Tensor(log_probs, targets, *how)
    *lengths, blank, zero_infinity = how
    out: Tensor = torch.ops.aten._ctc_loss_backward.Tensor(
        grad.contiguous(), log_probs, targets, *lengths, loss, alpha, blank, zero_infinity
    )
    return out.contiguous()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    out = torch.ops.autopar.ctc_loss_backward(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return out, None, None, None, None, None


ctc_loss.register_autograd(_backward, setup_context=_setup)


def functional_ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss` by this operator, while a model is captured."""
    alone = log_probs.dim() == 2
    if alone:
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
    lengths = [torch.as_tensor(n, device=log_probs.device).reshape(-1) for n in (input_lengths, target_lengths)]
    loss: Tensor = torch.ops.autopar.ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)
    if reduction == "mean":
        return (loss / lengths[1].clamp(min=1).to(loss.dtype)).mean()
    return loss.sum() if reduction == "sum" else loss[0] if alone else loss

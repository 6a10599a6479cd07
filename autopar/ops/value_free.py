"""Functions of torch that read values on their way, which a graph cannot, rewritten without.

    gaussian_nll_loss    checks whether a variance is negative, and raises
    cov, corrcoef        check whether there are degrees of freedom, and warn
    linear_cross_entropy runs in chunks of its own, with derivatives in Python (`loss_chunks` makes chunks of any loss)

They replace torch's functions while a model is captured. Checks of shapes are left to torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_GAUSSIAN_NLL_LOSS = torch.nn.functional.gaussian_nll_loss
_COV, _CORRCOEF = torch.cov, torch.corrcoef
_LINEAR_CROSS_ENTROPY = getattr(torch.nn.functional, "linear_cross_entropy", None)  # from torch 2.13


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """`torch.nn.functional.gaussian_nll_loss`."""
    if not isinstance(var, Tensor):
        return _GAUSSIAN_NLL_LOSS(input, target, var, full=full, eps=eps, reduction=reduction)
    if var.shape == input.shape[:-1]:  # one variance for each row
        var = var.unsqueeze(-1)
    unlike = [mine for whole, mine in zip(input.shape, var.shape, strict=False) if whole != mine]
    if var.dim() != input.dim() or unlike not in ([], [1]):
        raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    var = torch.where(var < eps, eps + (var - var.detach()), var)  # a clamp with a gradient below eps, like torch's
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def cov(x: Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Tensor:
    """`torch.cov`; torch's own for weighted observations."""
    if fweights is not None or aweights is not None or not x.is_floating_point() or x.dim() > 2:
        return _COV(x, correction=correction, fweights=fweights, aweights=aweights)
    rows = x if x.dim() == 2 else x.reshape(1, -1)
    rows = rows - rows.mean(1, keepdim=True)
    found = rows @ rows.t() / max(rows.shape[1] - correction, 0)
    return found if found.shape[0] > 1 else found.squeeze()


def corrcoef(x: Tensor) -> Tensor:
    """`torch.corrcoef`."""
    if not x.is_floating_point() or x.dim() > 2:
        return _CORRCOEF(x)
    found = cov(x)
    if found.dim() == 0:
        return found / found
    deviations = found.diagonal().sqrt()
    return (found / deviations.unsqueeze(1) / deviations).clamp(-1.0, 1.0)


def linear_cross_entropy(*args: Any, options: Any = None, **how: Any) -> Tensor:
    """`torch.nn.functional.linear_cross_entropy`, of all rows at once."""
    assert _LINEAR_CROSS_ENTROPY is not None
    return _LINEAR_CROSS_ENTROPY(*args, **how)


VALUE_FREE: dict[Callable[..., Any], Callable[..., Any]] = {
    _GAUSSIAN_NLL_LOSS: gaussian_nll_loss,
    _COV: cov,
    Tensor.cov: cov,
    _CORRCOEF: corrcoef,
    Tensor.corrcoef: corrcoef,
    **({_LINEAR_CROSS_ENTROPY: linear_cross_entropy} if _LINEAR_CROSS_ENTROPY else {}),
}

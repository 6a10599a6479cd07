"""Autograd functions whose backward is their own: not linear in the gradient, not differentiable, over whole dims."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Clamped(torch.autograd.Function):
    """Clips the gradient to a limit, in place, and scales where it is large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.limit = limit
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad *= 3.0
        return torch.where(grad.abs() > ctx.limit, grad.clamp(-ctx.limit, ctx.limit), grad * 0.5), None


class Signed(torch.autograd.Function):
    """The sign of the gradient, times a part of it that is cut off; an identity that returns its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        with torch.no_grad():
            size = grad.abs()
        return torch.sign(grad) * size.sqrt() + grad.detach() * torch.round(grad * 1e3)


class Normalised(torch.autograd.Function):
    """Each row of the gradient divided by its norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / (grad.norm(dim=-1, keepdim=True) + 1e-3) * x.cos()


class TotalNorm(torch.autograd.Function):
    """The whole gradient divided by its norm: rows of all ranks and microbatches meet."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


class Recomputed(torch.autograd.Function):
    """Runs its forward again in the backward, and asks for the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return torch.tanh(x) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x, scale = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            return torch.autograd.grad(torch.tanh(x) * scale, (x, scale), grad.tanh())


class Affine(torch.autograd.Function):
    """A linear layer that clips the gradient of its input and takes signs of its weight's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.nn.functional.linear(x, w, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        gx = gw = gb = None
        if ctx.needs_input_grad[0]:
            gx = (grad @ w).clamp(-1e-2, 1e-2)
        if ctx.needs_input_grad[1]:
            gw = torch.tanh(30 * torch.einsum("bso,bsi->oi", grad, x))
        if ctx.needs_input_grad[2]:
            gb = grad.sum((0, 1))
        return gx, gw, gb


class Quantised(torch.autograd.Function):
    """Weights rounded to a grid; their gradient passes where they are small."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w.abs() < 0.3)
        return torch.round(w * 8) / 8

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (small,) = ctx.saved_tensors
        return torch.where(small, grad, torch.zeros_like(grad)) + (grad * 0.1).masked_fill(small, 0.0)


class Clipped(torch.autograd.Function):
    """A weight as it is; its gradient is clipped: not the sum of what ranks would clip each."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-3e-3, 3e-3)


class Injected(torch.autograd.Function):
    """An auxiliary loss joins the gradients without joining the loss, as routers of experts do it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: Tensor) -> Tensor:
        ctx.dtype, ctx.wanted = extra.dtype, extra.requires_grad
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        extra = torch.ones(1, dtype=ctx.dtype, device=grad.device) * 0.3 if ctx.wanted else None
        return grad, extra


class Pair(torch.autograd.Function):
    """Two results with gradients and one without, a saved intermediate; results that mix in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inner = torch.sin(x)
        total = inner + y
        ctx.save_for_backward(inner, total)
        where = x > 0
        ctx.mark_non_differentiable(where)
        return inner * y, total, where

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor, _: Any) -> Any:
        inner, total = ctx.saved_tensors
        return torch.maximum(a, b) * inner, (a * b * 100).tanh() * total


class CustomLoss(torch.autograd.Function):
    """A mean squared error with its gradient made in the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * (2.0 / x.numel()))
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (made,) = ctx.saved_tensors
        return made * grad.clamp(max=0.5)

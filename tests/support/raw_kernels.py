"""Autograd functions whose kernels work on memory, as those of Triton do: they cannot run on fake tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor


def memory(x: Tensor) -> Any:
    """The numbers of a contiguous float64 or float32 tensor, by its address."""
    assert x.is_contiguous()
    kind = ctypes.c_double if x.dtype == torch.float64 else ctypes.c_float
    pointer = ctypes.cast(x.data_ptr(), ctypes.POINTER(kind))
    return np.ctypeslib.as_array(pointer, shape=(x.numel(),))


class SwiGLU(torch.autograd.Function):
    """Element-wise, as Liger's."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.contiguous(), b.contiguous()
        out = torch.empty_like(a)
        x = memory(a)
        memory(out)[:] = x / (1 + np.exp(-x)) * memory(b)
        ctx.save_for_backward(a, b)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        da, db = torch.empty_like(a), torch.empty_like(b)
        g, x, y = memory(grad.contiguous()), memory(a), memory(b)
        s = 1 / (1 + np.exp(-x))
        memory(da)[:] = g * y * s * (1 + x * (1 - s))
        memory(db)[:] = g * x * s
        return da, db


class RMSNorm(torch.autograd.Function):
    """Over the last dim, with a weight; rows flattened, a saved statistic, numbers kept on ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
        shape = x.shape
        x = x.contiguous().view(-1, shape[-1])
        y, rstd = torch.empty_like(x), torch.empty(x.shape[0], dtype=x.dtype)
        rows = memory(x).reshape(x.shape)
        memory(rstd)[:] = 1 / np.sqrt((rows**2).mean(-1) + eps)
        memory(y).reshape(x.shape)[:] = rows * memory(rstd)[:, None] * memory(w)
        ctx.save_for_backward(x, w, rstd)
        ctx.shape, ctx.width = shape, shape[-1]
        return y.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w, rstd = ctx.saved_tensors
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        g, rows, r = memory(grad.contiguous()).reshape(x.shape), memory(x).reshape(x.shape), memory(rstd)[:, None]
        h = g * memory(w)
        memory(dx).reshape(x.shape)[:] = r * (h - rows * r**2 * (h * rows).sum(-1, keepdims=True) / ctx.width)
        memory(dw)[:] = (g * rows * r).sum(0)
        return dx.view(ctx.shape), dw, None


class Scan(torch.autograd.Function):
    """A decaying sum along a sequence [B, S, H], as state-space models have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, decay: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, made, d = memory(x).reshape(x.shape), memory(out).reshape(x.shape), memory(decay)
        state = np.zeros_like(rows[:, 0])
        for t in range(x.shape[1]):
            state = state * d + rows[:, t]
            made[:, t] = state
        ctx.save_for_backward(out, decay)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        out, decay = ctx.saved_tensors
        dx, dd = torch.empty_like(out), torch.zeros_like(decay)
        g, made, d = memory(grad.contiguous()).reshape(out.shape), memory(out).reshape(out.shape), memory(decay)
        carry = np.zeros_like(g[:, 0])
        for t in reversed(range(out.shape[1])):
            carry = carry * d + g[:, t]
            memory(dx).reshape(out.shape)[:, t] = carry
            if t:
                memory(dd)[:] += (carry * made[:, t - 1]).sum(0)
        return dx, dd

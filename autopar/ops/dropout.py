"""`autopar::dropout`: a mask that depends on (seed, site, global element index) and on nothing else.

The mask is a counter-based hash in int32 arithmetic (wrapping multiplication, logical shifts). So it is the same on
CPU and CUDA, for every mesh (a rank hashes the global indices of the rows it holds) and in recomputation, and no mask
has to be saved: the backward is the same operator on the gradient.

    key    = three words from (seed, site)
    row    = mix(mix(global row index, key 0) + key 1)       one word per index of all dims but the last
    column = mix(global column index, key 2)                 one word per index of the last dim
    hash   = mix(row + column)                               one mix per element; 24 bits of it are compared with p

On GPUs where Triton runs, all of it is one kernel (`autopar.ops.kernels.fused_dropout`), which is bitwise equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autopar.ops.declare import dense, operator
from autopar.ops.kernels.triton_module import module_that_runs

_BITS = 24  # of the hash that are compared with p: p is exact to 6e-8


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int32 (torch's shift repeats the sign bit)."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash with low bias, in place.

    The multipliers and shifts are the best two-round ones of https://github.com/skeeto/hash-prospector (lowbias32
    family: 16 21f0aaad 15 d35a2d97 15); the second is written as a signed number.
    """
    x ^= _shift_right(x, 16)
    x *= 0x21F0AAAD
    x ^= _shift_right(x, 15)
    x *= 0xD35A2D97 - (1 << 32)
    x ^= _shift_right(x, 15)
    return x


def _word(x: Tensor) -> Tensor:
    """The low 32 bits of an int64 as int32, without relying on an overflowing cast."""
    low = x & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)


def _keys(seed: Tensor, site: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three independent words from the seed (int64 scalar tensor) and the site of the call."""
    seed = seed.reshape(()).to(torch.int64)
    key = _mix(_word(seed) + 0x3C6EF372)
    key = _mix(key ^ _word(seed >> 32))
    key = _mix(key + (site * 0x9E3779B9 & 0x7FFFFFFF))
    first = key.clone()
    second = _mix(first + 0x1B873593)
    return first, second, _mix(second + 0x2545F491)


def _whole(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, device=device)


def keep_mask(
    local_shape: Sequence[int], seed: Tensor, p: float, site: int, index: Sequence[Tensor], shape: Sequence[int]
) -> Tensor:
    """Bool mask of ``local_shape``: True where an element is kept, which happens with probability 1 - p.

    ``index`` holds per dim the int64 global indices of the local rows, or is empty when the tensor is unsharded;
    ``shape`` is the global shape (empty: the local one).
    """
    whole = list(shape) or list(local_shape)
    assert len(whole) == len(local_shape), f"dropout: global shape {whole} for a tensor of shape {local_shape}"
    if (fused := fused_for(seed)) and fused.takes(local_shape):
        return fused.mask(local_shape, seed, p, site, index, shape)
    hashed = random_words(local_shape, seed, site, index, shape)
    return _shift_right(hashed, 32 - _BITS) >= round(p * (1 << _BITS))


def random_words(
    local_shape: Sequence[int],
    seed: Tensor,
    site: int,
    index: Sequence[Tensor],
    shape: Sequence[int],
    second: bool = False,
) -> Tensor:
    """A random word of 32 bits (int32) for each element; arguments of `keep_mask`. ``second``: another word."""
    device = seed.device
    whole = list(shape) or list(local_shape)
    axes = list(index) or [_whole(size, device) for size in local_shape]
    if not whole:  # a scalar is a row of one element
        whole, axes = [1], [_whole(1, device)]
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for dim, size in enumerate(whole[:-1]):
        rows = (rows * size).unsqueeze(-1) + axes[dim].to(device)
    keys = _keys(seed, site)
    if second:
        keys = _mix(keys[0] + 0x5BD1E995), _mix(keys[1] + 0x38B34AE5), _mix(keys[2] + 0x52DCE729)
    row = _mix(_mix(_word(rows) ^ keys[0]) + keys[1])
    if math.prod(whole[:-1]) > 1 << 32:
        row = _mix(row ^ _word(rows >> 32))
    column = _mix(_word(axes[-1].to(device)) ^ keys[2])
    return _mix(row.unsqueeze(-1) + column).reshape(tuple(local_shape))


def fused_for(x: Tensor) -> Any:
    """`autopar.ops.kernels.fused_dropout`, if the tensor has data and its device runs it; else None."""
    return _fused(x.device) if x.is_cuda and type(x) in (Tensor, Parameter) else None


def _fused(device: torch.device) -> Any:
    instead = "each mask takes a dozen kernels instead of one, with an equal result"
    return module_that_runs("autopar.ops.kernels.fused_dropout", device, _try, instead)


def _try(module: Any, device: torch.device) -> None:
    module.mask((1, 1), torch.zeros((), dtype=torch.int64, device=device), 0.5, 0, [], [])


@operator("(Tensor x, Tensor seed, float p, int site, Tensor[] index, SymInt[] shape) -> Tensor", dense)
def dropout(x: Tensor, seed: Tensor, p: float, site: int, index: list[Tensor], shape: list[int]) -> Tensor:
    """Zero each element of ``x`` with probability ``p``, scale the others by 1 / (1 - p). p = 1 gives zeros."""
    if p >= 1.0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if (fused := fused_for(x)) and fused.takes(x.shape, x.dtype):
        return fused.dropped(x, seed.to(x.device), p, site, index, shape)
    keep = keep_mask(x.shape, seed.to(x.device), p, site, index, shape)
    return (x * keep).mul_(1.0 / (1.0 - p)).contiguous()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, ctx.p, ctx.site, index, ctx.shape = inputs
    ctx.save_for_backward(seed, *index)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    seed, *index = ctx.saved_tensors
    out = torch.ops.autopar.dropout(grad, seed, ctx.p, ctx.site, index, ctx.shape)
    return out, None, None, None, [None] * len(index), None if ctx.shape else []  # an empty list mirrors as a list


dropout.register_autograd(_backward, setup_context=_setup)

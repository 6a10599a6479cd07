"""Operators that give each token a result from a few tokens beside it, and none of another length between.

A model spells them as padding, a convolution or a slice, whose results have other lengths; the pass `token_windows`
puts these in their place. Over a sharded sequence they need a halo: `autopar.ir.halo`.

    shift(x, 1, 1, False)      0 x0 x1 x2
    shift(x, 1, 1, True)       x3 x0 x1 x2
    shift(x, 1, -1, False)     x1 x2 x3 0
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def shift(x: Tensor, dim: int, by: int, circular: bool) -> Tensor:
    """``x`` moved along ``dim``: row i of the result is row i - ``by``, or zeros where there is none (``circular``: one
    of the other end). The shape stays."""
    return x.roll(by, dim) if circular else _moved(x, dim, by)


def token_conv1d(
    input: Tensor, weight: Tensor, bias: Tensor | None, before: int, behind: int, dilation: int, groups: int
) -> Tensor:
    """A convolution of stride 1 over ``before`` and ``behind`` more rows of zeros: input [B, C, T], weight
    [O, C / groups, K], (K - 1) * dilation = before + behind -> [B, O, T]."""
    return F.conv1d(F.pad(input, (before, behind)), weight, bias, dilation=dilation, groups=groups)


def _moved(x: Tensor, dim: int, by: int) -> Tensor:
    rows = x.shape[dim]
    by = max(-rows, min(by, rows))
    zeros = x.new_zeros([abs(by) if d == dim else n for d, n in enumerate(x.shape)])
    kept = x.narrow(dim, max(-by, 0), rows - abs(by))
    return torch.cat([zeros, kept] if by > 0 else [kept, zeros], dim)

"""`autopar::random`: numbers that depend on (seed, site, global element index) and on nothing else, like dropout.

    kind            a, b                    in the requested dtype
    uniform         from, to                24 bits (53 in double precision, 11 and 8 in half ones)
    normal          mean, deviation         by the inverse of its distribution function, in double precision
    log_normal      of the normal           exp(normal)
    exponential     rate                    above 0
    geometric       probability             at least 1
    cauchy          median, width
    integers        from, to                whole numbers below ``to``
    keep            probability             1 or 0, like the masks of dropout (`autopar.ops.dropout.keep_mask`)

The words are those of `autopar.ops.dropout`, two where 32 bits are not enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.ops.declare import operator
from autopar.ops.dropout import keep_mask, random_words

BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
KINDS = ("uniform", "normal", "log_normal", "exponential", "geometric", "cauchy", "integers", "keep")


def drawn(
    local_shape: Sequence[int],
    seed: Tensor,
    kind: str,
    a: float,
    b: float,
    site: int,
    index: Sequence[Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Numbers of ``local_shape`` on the device of the seed; ``index`` and ``shape`` as in `keep_mask`."""
    place = seed, site, index, shape
    if kind == "keep":
        return keep_mask(local_shape, seed, 1.0 - a, site, index, shape).to(dtype)
    if kind == "uniform" and BITS.get(dtype, 53) < 53:
        bits = BITS[dtype]
        found = ((random_words(local_shape, *place).to(torch.int64) & 0xFFFFFFFF) >> (32 - bits)).to(dtype) * 2.0**-bits
        return found if (a, b) == (0.0, 1.0) else found * (b - a) + a
    whole = _whole_numbers(local_shape, *place)
    if kind == "uniform":
        return (whole * 2.0**-53 * (b - a) + a).to(dtype)
    if kind == "integers":
        return (torch.floor(whole * 2.0**-53 * (b - a)) + a).to(dtype)
    return _distributed(kind, (whole + 0.5) * 2.0**-53, a, b, dtype)


def _whole_numbers(
    local_shape: Sequence[int], seed: Tensor, site: int, index: Sequence[Tensor], shape: Sequence[int]
) -> Tensor:
    """Integers from 0 to 2**53 - 1, in double precision."""
    high, low = (
        random_words(local_shape, seed, site, index, shape, second).to(torch.int64) for second in (False, True)
    )
    return (((high & 0xFFFFFFFF) >> 5) * (1 << 26) + ((low & 0xFFFFFFFF) >> 6)).to(torch.float64)


def _distributed(kind: str, between: Tensor, a: float, b: float, dtype: torch.dtype) -> Tensor:
    """``between``: uniform, above 0 and below 1."""
    if kind == "exponential":
        found = (between.log_() / -a).to(dtype)
        return found.clamp_(min=torch.finfo(dtype).tiny)
    if kind == "geometric":
        return torch.ceil(between.log_() / math.log1p(-a)).clamp_(min=1.0).to(dtype)
    if kind == "cauchy":
        return (torch.tan((between - 0.5) * math.pi) * b + a).to(dtype)
    assert kind in ("normal", "log_normal"), kind
    found = torch.special.ndtri(between) * b + a
    return (found.exp_() if kind == "log_normal" else found).to(dtype)


@operator(
    "(Tensor like, Tensor seed, str kind, float a, float b, int site, Tensor[] index, SymInt[] shape, "
    "ScalarType dtype) -> Tensor",
    lambda like, seed, kind, a, b, site, index, shape, dtype: torch.empty_like(
        like, dtype=dtype, memory_format=torch.contiguous_format
    ),
)
def random(
    like: Tensor,
    seed: Tensor,
    kind: str,
    a: float,
    b: float,
    site: int,
    index: list[Tensor],
    shape: list[int],
    dtype: torch.dtype,
) -> Tensor:
    """Random numbers in the shape of ``like``, whose values do not matter."""
    return drawn(like.shape, seed.to(like.device), kind, a, b, site, index, shape, dtype)

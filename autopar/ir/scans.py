"""Cumulative sums and products over a sharded dim: each rank scans its own rows, and adds what came before them.

    cumsum(x, 1):   rank 0: 1 3 6    rank 1: 4 9 15     totals 6, 15     -->     rank 0: 1 3 6    rank 1: 10 15 21

The last rows of all chunks, their totals, are gathered and scanned on every rank, which slices those before its own
chunks. One row of each chunk is sent. Differentiation gives the backward: totals receive the gradients of all that
came after them. (Blelloch, Prefix Sums and Their Applications, 1990.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.conversions import exchange
from autopar.ir.halo import of_chunks
from autopar.ir.placement import REPLICATE, Shard

aten = torch.ops.aten


@dataclass(frozen=True)
class Scan:
    """``join``: a total with the rows behind it. ``nothing``: the total of no rows."""

    name: str
    join: Callable[[Tensor, Tensor], Tensor]
    nothing: float


SCANS: dict[Any, Scan] = {
    aten.cumsum.default: Scan("cumsum", torch.add, 0.0),
    aten.cumprod.default: Scan("cumprod", torch.mul, 1.0),
    aten.logcumsumexp.default: Scan("logcumsumexp", torch.logaddexp, -math.inf),
}


def scan_of_piece(
    name: str, x: Tensor, dim: int, dtype: torch.dtype | None, axis: str, size: int, blocks: list[int]
) -> Tensor:
    """The scan of the aten operator ``name`` along ``dim`` on the rows of a rank, which are chunks of ``blocks``."""
    scan = getattr(aten, name).default
    known = SCANS[scan]
    more = {} if dtype is None else {"dtype": dtype}
    shard = Shard(dim, tuple(blocks))
    own = [scan(chunk, dim, **more) for chunk in x.chunk(max(1, len(blocks)), dim)]
    totals = torch.cat([chunk.narrow(dim, chunk.shape[dim] - 1, 1) for chunk in own], dim)
    piece = of_chunks(shard, 1, size)
    whole = scan(exchange(totals, axis, size, str(piece), str(REPLICATE)), dim)
    first = torch.full_like(whole.narrow(dim, 0, 1), known.nothing)
    before = torch.cat([first, whole.narrow(dim, 0, whole.shape[dim] - 1)], dim)
    carried = exchange(before, axis, size, str(REPLICATE), str(piece)).chunk(len(own), dim)
    return torch.cat([known.join(total, chunk) for total, chunk in zip(carried, own, strict=True)], dim)

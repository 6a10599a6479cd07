"""Products of experts whose rows are counted on the device only: the host never asks for a count.

    tiles = Tiles(offsets, N)      the rows of every expert on whole tiles of a fixed number of rows, zeros behind them
    tiles.product(rows, matrices)  [N, I] times each row's [I, O] -> [N, O]
    tiles.outer(left, right)       sum over each expert's rows of left^T right -> [E, I, O]

Any split of N rows on E experts fits on N // T + E tiles of T rows (and on N), so shapes are fixed. With T = N / 4E
these are a quarter more rows than there are. A tile's matrix is copied next to it, for a few tiles at a time: half of
what the matrices take.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

LEAST = 64  # rows of a tile: less does not fill a kernel


class Tiles:
    """Where the rows lie: expert e owns offsets[e-1] .. offsets[e] of N; rows behind the last offset are of none."""

    def __init__(self, offsets: Tensor, rows: int) -> None:
        experts = offsets.shape[0]
        self.experts, self.height = experts, min(max(rows // (4 * experts), LEAST), max(rows, 1))
        self.count = min(rows // self.height + experts, rows)
        ends = offsets.long()
        starts = torch.cat([ends.new_zeros(1), ends])  # of an expert more: that of the rows of none
        tiles = ((ends - starts[:-1] + self.height - 1) // self.height).cumsum(0)  # last one of each expert, + 1
        at = torch.arange(rows, device=offsets.device)
        expert = torch.searchsorted(ends, at, right=True)
        first = torch.cat([tiles.new_zeros(1), tiles[:-1], tiles.new_full((1,), self.count)])
        behind = self.count * self.height  # the rows of none share one place behind all tiles
        place = first.index_select(0, expert) * self.height + at - starts.index_select(0, expert)
        self.place = place.clamp_(max=behind)
        numbers = torch.arange(self.count, device=offsets.device)
        self.expert = torch.searchsorted(tiles, numbers, right=True).clamp_(max=experts - 1)  # a spare tile is zeros

    def product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """rows [N, I], matrices [E, I, O] -> [N, O]; zeros for the rows of no expert."""
        tiled = self._tiled(rows)
        out = rows.new_zeros(self.count * self.height + 1, matrices.shape[2])
        made = out[:-1].view(self.count, self.height, out.shape[1])
        for part in self._parts():
            torch.bmm(tiled[part], matrices.index_select(0, self.expert[part]), out=made[part])
        return out.index_select(0, self.place)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """left [N, I], right [N, O] -> [E, I, O]; half types are added up in float32."""
        one, other = self._tiled(left), self._tiled(right)
        wide = torch.promote_types(left.dtype, torch.float32)
        out = torch.zeros(self.experts, left.shape[1], right.shape[1], dtype=wide, device=left.device)
        for part in self._parts():
            out.index_add_(0, self.expert[part], torch.bmm(one[part].transpose(1, 2), other[part]).to(wide))
        return out.to(left.dtype)

    def _tiled(self, rows: Tensor) -> Tensor:
        """[N, I] -> [tiles, height, I]."""
        padded = rows.new_zeros(self.count * self.height + 1, rows.shape[1]).index_copy_(0, self.place, rows)
        return padded[:-1].view(self.count, self.height, rows.shape[1])

    def _parts(self) -> Iterator[slice]:
        """A few tiles at a time."""
        few = max(self.experts // 2, 1)
        return (slice(start, start + few) for start in range(0, self.count, few))

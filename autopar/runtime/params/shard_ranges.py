"""Which positions of a whole tensor a rank holds, of one that axes of a mesh cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from autopar.ir.mesh import AXES
from autopar.ir.placement import Placement, Shard, place_in_block

Cuts = tuple[tuple[str, Shard], ...]  # the axes that cut the tensor, in cut order


def cuts_of(placements: Mapping[str, Placement], sizes: Mapping[str, int]) -> Cuts:
    """The shards of a parameter on axes of more than one rank, in cut order (inner axes first)."""
    found = {a: p for a, p in placements.items() if isinstance(p, Shard) and sizes.get(a, 1) > 1}
    return tuple((a, found[a]) for a in reversed(AXES) if a in found)


@dataclass(frozen=True)
class ShardRange:
    """Consecutive positions in every dim: where they start in the whole and in the local tensor, and how many."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    local: tuple[int, ...]

    def of_local(self, local: Tensor) -> Tensor:
        """The box as a view of the local tensor."""
        for dim, (at, length) in enumerate(zip(self.local, self.size)):
            local = local.narrow(dim, at, length)
        return local


def boxes(
    shape: Sequence[int], cuts: Cuts, sizes: Mapping[str, int], coordinate: Mapping[str, int]
) -> list[ShardRange]:
    """What the rank at a coordinate holds of a tensor of this (whole) shape."""
    runs = [_runs(size, dim, cuts, sizes, coordinate) for dim, size in enumerate(shape)]
    found = itertools.product(*runs)
    return [ShardRange(*(tuple(r[i] for r in box) for i in range(3))) for box in found]


def _runs(
    size: int, dim: int, cuts: Cuts, sizes: Mapping[str, int], coordinate: Mapping[str, int]
) -> list[tuple[int, int, int]]:
    """(global start, length, local start) of each run of consecutive positions of a dim that this rank holds."""
    held = [range(size)]
    for axis, shard in cuts:
        if shard.dim == dim:
            held = _piece_of(held, shard, sizes[axis], coordinate[axis])
    out: list[tuple[int, int, int]] = []
    at = 0
    for run in held:
        if out and out[-1][0] + out[-1][1] == run.start:
            out[-1] = (out[-1][0], out[-1][1] + len(run), out[-1][2])
        else:
            out.append((run.start, len(run), at))
        at += len(run)
    return out


def _piece_of(held: list[range], shard: Shard, ranks: int, rank: int) -> list[range]:
    """What a rank holds of positions that are cut once more."""
    out: list[range] = []
    start = 0
    for block in shard.blocks or (sum(map(len, held)),):
        rows = abs(block) // ranks
        out += _between(held, start + place_in_block(block, ranks, rank) * rows, rows)
        start += abs(block)
    return out


def _between(held: list[range], start: int, rows: int) -> Iterator[range]:
    """Those of the positions that stand in start .. start + rows."""
    for run in held:
        if part := run[max(start, 0) : max(start + rows, 0)]:
            yield part
        start -= len(run)

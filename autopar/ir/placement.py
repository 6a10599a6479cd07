"""The four placements of a value on one mesh axis, and the one table of conversions between them.

A placement says where the value is *and where its gradient is*:

    Shard(d)    shards of tensor dim d                gradient Shard(d)
    Replicate   the same on all ranks                 gradient Partial: own contribution only
    Invariant   the same on all ranks                 gradient Invariant: already reduced
    Partial     addends, not yet reduced              gradient Replicate

Communication happens only in conversions. The backward of a conversion needs no table of its own:
the transpose of a -> b is dual(b) -> dual(a).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from autopar.adapters.dispatch import without_modes
from autopar.ops.padded_pieces import crop_blocks, pad_blocks, padded_size, rows_per_rank
from autopar.spelling import did_you_mean


@dataclass(frozen=True)
class Shard:
    """Shards of tensor ``dim``. ``blocks`` splits the dim into consecutive blocks first (their sizes sum
    to the dim); each rank holds its shard of every block, concatenated. ``()`` means one block. A block of negative
    size is dealt from the last rank to the first.

    Fused projections need blocks: GPT-2's qkv is ``Shard(0, (h, h, h))``, so that each rank holds
    its own heads of q, of k and of v. A causal sequence needs signs: with ``Shard(1, (s/2, -s/2))``, known as zigzag,
    each of n ranks holds chunk i and chunk 2n-1-i of 2n, and all have the same number of pairs to compute.

    ``routed``: the rows of a rank are those that were routed to its experts; their number is known at run time. Shapes
    assume an even share for each rank. No conversion leads to or from such shards.

    ``units``: for sizes that do not divide. Each block consists of so many equal units (14 heads, 63 words), which stay
    whole. A rank holds n of them, rounded up, and the last ranks what is left; in graphs their shards are *padded* to n
    units, so that all ranks have one shape. 0: every block divides over the ranks.
    """

    dim: int
    blocks: tuple[int, ...] = ()
    routed: bool = False
    units: int = 0

    def __post_init__(self) -> None:
        assert self.dim >= 0, "Shard.dim counts from the front"
        blocks = tuple(b for b in self.blocks if b)  # an empty block (of an empty operand of cat) has no shards
        object.__setattr__(self, "blocks", () if len(blocks) == 1 and blocks[0] > 0 else blocks)

    def __str__(self) -> str:
        if self.routed:
            return f"S({self.dim};routed)"
        units = f"/{self.units}" if self.units else ""
        return f"S({self.dim}{units})" if not self.blocks else f"S({self.dim}{units};{_runs(self.blocks)})"


@dataclass(frozen=True)
class Replicate:
    """The same on all ranks; each rank has only its own contribution to the gradient."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Invariant:
    """The same on all ranks, and so is the gradient."""

    def __str__(self) -> str:
        return "I"


@dataclass(frozen=True)
class Partial:
    """Addends: the value is the sum over ranks. The gradient is the same on all ranks."""

    def __str__(self) -> str:
        return "P"


Placement = Shard | Replicate | Invariant | Partial
Placements = Mapping[str, Placement]  # mesh axis name -> placement; an absent axis means INVARIANT

REPLICATE, INVARIANT, PARTIAL = Replicate(), Invariant(), Partial()

# The number of shards on a mesh axis. Token slices are no equal shards: one of l out of S tokens is one of S/l.
Pieces = int | Fraction


def repetitions(blocks: Sequence[int]) -> int:
    """How often the shortest pattern of blocks repeats: 3 for (8, -8, 8, -8, 8, -8), 1 for (8, 4) and for ()."""
    n = len(blocks)
    periods = (p for p in range(1, n + 1) if n % p == 0 and tuple(blocks[:p]) * (n // p) == tuple(blocks))
    return max(n // next(periods, 1), 1)


def _runs(blocks: tuple[int, ...]) -> str:
    """(16,16,16,8) -> '16x3,8'; (8,-8,8,-8) -> '(8,-8)x2'."""
    times = repetitions(blocks)
    if 1 < times < len(blocks):
        return f"({_runs(blocks[: len(blocks) // times])})x{times}"
    runs = [(size, len(list(group))) for size, group in itertools.groupby(blocks)]
    return ",".join(str(size) if n == 1 else f"{size}x{n}" for size, n in runs)


_RUNS = r"-?\d+(?:x\d+)?(?:,-?\d+(?:x\d+)?)*"
_ROUTED = re.compile(r"S\((\d+);routed\)")
_SHARD = re.compile(rf"S\((\d+)(?:/(\d+))?(?:;(?:({_RUNS})|\(({_RUNS})\)x(\d+)))?\)")


_MOST_BLOCKS = 2**24  # more than any dim has; a typo would take all memory


def parse_placement(text: str) -> Placement:
    """Inverse of ``str(placement)``: 'R', 'I', 'P', 'S(0)', 'S(0;32,16x2)', 'S(1;8,-8)', 'S(0;(8,-8)x2)', 'S(0/63)'."""
    fixed: dict[str, Placement] = {"R": REPLICATE, "I": INVARIANT, "P": PARTIAL}
    if text in fixed:
        return fixed[text]
    if routed := _ROUTED.fullmatch(text):
        return Shard(int(routed[1]), routed=True)
    match = _SHARD.fullmatch(text)
    if not match:
        raise ValueError(
            f"placement: expected R, I, P, S(dim), S(dim;blocks) or S(dim/units), found {text!r}{_hint(text)}"
        )
    dim, units, plain, pattern, times = match.groups()
    runs = [run.partition("x") for run in filter(None, (plain or pattern or "").split(","))]
    if sum(int(count or 1) for _, _, count in runs) * int(times or 1) > _MOST_BLOCKS:
        raise ValueError(f"placement: expected at most {_MOST_BLOCKS} blocks, found {text!r}")
    blocks = [int(size) for size, _, count in runs for _ in range(int(count or 1))]
    return Shard(int(dim), tuple(blocks) * int(times or 1), units=int(units or 0))


def _hint(text: str) -> str:
    """torch's names of placements, and other spellings of ours."""
    numbers = re.search(r"\d+", text)
    shard = {word: f"S({numbers[0]})" for word in ("s", "shard", "split")} if numbers else {}
    words = {"replicate": "R", "replicated": "R", "invariant": "I", "whole": "I", "partial": "P", **shard}
    return did_you_mean(re.sub(r"[^a-z]", "", text.lower()), ("R", "I", "P"), words)


def dual(placement: Placement) -> Placement:
    """The placement of the gradient of a value with this placement."""
    if isinstance(placement, Replicate):
        return PARTIAL
    if isinstance(placement, Partial):
        return REPLICATE
    return placement


def transpose(src: Placement, dst: Placement) -> tuple[Placement, Placement]:
    """The conversion that the gradient goes through: the transpose of a -> b is dual(b) -> dual(a)."""
    return dual(dst), dual(src)


def shard_of_size(dim: int, size: int, ranks: Pieces) -> Shard:
    """Shards of a dim of any size: where it does not divide over the ranks, each entry is a unit."""
    return Shard(dim, units=size if size % ranks else 0)


# (source, target) -> collective. The only such table; the backward column follows by `transpose`.
CONVERSIONS: dict[tuple[type, type], str] = {
    (Invariant, Replicate): "none",
    (Partial, Invariant): "all_reduce",
    (Partial, Replicate): "all_reduce",
    (Partial, Shard): "reduce_scatter",
    (Shard, Replicate): "all_gather",
    (Shard, Invariant): "all_gather",
    (Invariant, Shard): "slice",
    (Replicate, Shard): "slice",
    (Shard, Shard): "all_to_all",
    (Shard, Partial): "pad",  # the transpose of Replicate -> Shard
    (Replicate, Partial): "divide",  # equal copies are addends once divided by their number; its own transpose
}
# Replicate -> Invariant has no row: it would claim that an unreduced gradient is reduced.


def conversion(src: Placement, dst: Placement) -> str:
    """What a conversion does: none, slice, pad, divide, all_gather, reduce_scatter, all_reduce, all_to_all.

    Raises ValueError for a pair that no communication makes right (Replicate -> Invariant).
    """
    if src == dst:
        return "none"
    kind = CONVERSIONS.get((type(src), type(dst)))
    if kind is None or any(isinstance(p, Shard) and p.routed for p in (src, dst)):
        raise ValueError(f"placement: no conversion {src} -> {dst}")
    return kind


# --- shards -------------------------------------------------------------------------------------------


def extent(blocks: Iterable[int]) -> int:
    """The size of the dim that blocks split, in whichever direction they are dealt."""
    return sum(map(abs, blocks))


def place_in_block(block: int, ranks: int, rank: int) -> int:
    """Which shard of a block a rank holds: counted from the end where the block is negative."""
    return rank if block > 0 else ranks - 1 - rank


def scaled_blocks(blocks: Sequence[int], size: int) -> tuple[int, ...]:
    """Blocks for a dim of ``size``, in the same ratio and direction; () stays ()."""
    whole = extent(blocks)
    assert not any(b * size % whole for b in blocks), f"blocks of {list(blocks)} do not scale to {size}"
    return tuple(b * size // whole for b in blocks)


def check_shard(size: int, placement: Shard, ranks: Pieces) -> None:
    """Well-formed: blocks sum to the dim, every block divides over the ranks, or into the units."""
    blocks = [abs(b) for b in placement.blocks] or [size]
    if sum(blocks) != size:
        raise ValueError(f"placement: blocks of {placement} sum to {sum(blocks)}, the dim has size {size}")
    bad = [b for b in blocks if b % (placement.units or ranks)]
    if bad:
        over = f"into {placement.units} units" if placement.units else f"over {ranks} ranks"
        raise ValueError(f"placement: {placement} of size {size}: block of {bad[0]} does not divide {over}")


def local_shape(shape: Iterable[int], placement: Placement, ranks: Pieces) -> tuple[int, ...]:
    """Shape of one rank's shard in a graph, padding included."""
    out = list(shape)
    if isinstance(placement, Shard):
        check_shard(out[placement.dim], placement, ranks)
        size = out[placement.dim]
        if placement.units:
            assert isinstance(ranks, int), "token slices are not padded"
            size = rows_per_rank(size, placement.units, ranks)
        else:
            size = size // ranks if isinstance(ranks, int) else int(size / ranks)
        out[placement.dim] = size
    return tuple(out)


def piece(value: torch.Tensor, placement: Placement, ranks: int, rank: int) -> torch.Tensor:
    """Rank ``rank``'s shard of a global tensor, padded with zeros (a view if there is one block, and no padding)."""
    if not isinstance(placement, Shard):
        return value
    check_shard(value.shape[placement.dim], placement, ranks)
    value = pad_blocks(value, placement.dim, placement.blocks, placement.units, ranks)
    blocks = [padded_size(abs(b), placement.units, ranks) * (1 if b > 0 else -1) for b in placement.blocks]
    parts, start = [], 0
    for block in blocks or (value.shape[placement.dim],):
        rows = abs(block) // ranks
        parts.append(value.narrow(placement.dim, start + place_in_block(block, ranks, rank) * rows, rows))
        start += abs(block)
    return torch.cat(parts, placement.dim) if len(parts) > 1 else parts[0]


def rows_of_slice(size: int, placement: Shard, length: int, start: int, total: int) -> list[tuple[int, int]]:
    """(first row, rows) per block of a dim split into token slices, for tokens [start, start + length) of ``total``."""
    found, position = [], 0
    for block in placement.blocks or (size,):
        assert block > 0, f"{placement}: token slices follow one another, none is dealt backwards"
        rows = block // total  # per token
        found.append((position + start * rows, length * rows))
        position += block
    return found


def join(pieces: list[torch.Tensor], placement: Placement) -> torch.Tensor:
    """The global tensor from every rank's shard; Partial values are summed. Inverse of `piece`."""
    if isinstance(placement, Partial):
        return torch.stack(pieces).sum(0)
    if not isinstance(placement, Shard):
        return pieces[0]
    dim, units, ranks = placement.dim, placement.units, len(pieces)
    blocks = scaled_blocks(placement.blocks, ranks * pieces[0].shape[dim]) or (ranks * pieces[0].shape[dim],)
    columns = zip(*(p.split([abs(b) // ranks for b in blocks], dim) for p in pieces))
    dealt = (column if b > 0 else reversed(column) for b, column in zip(blocks, columns, strict=True))
    return crop_blocks(torch.cat([part for column in dealt for part in column], dim), dim, blocks, units, ranks)


def nested_piece(
    value: torch.Tensor, placements: Placements, sizes: Mapping[str, Pieces], coordinate: Mapping[str, int]
) -> torch.Tensor:
    """The shard of one mesh coordinate, padding included. ``sizes`` lists the axes in the order of sharding
    (`Mesh.cut_order`): each axis shards the result of the axes before it."""
    for axis, ranks in sizes.items():
        assert isinstance(ranks, int), f"axis {axis!r} has no equal shards"
        value = piece(value, placements.get(axis, INVARIANT), ranks, coordinate[axis])
    return value


def nested_shape(shape: Iterable[int], placements: Placements, sizes: Mapping[str, Pieces]) -> tuple[int, ...]:
    """Local shape after every axis has sharded, in the order of sharding."""
    out = tuple(shape)
    for axis, ranks in sizes.items():
        out = local_shape(out, placements.get(axis, INVARIANT), ranks)
    return out


# --- what is stored: shards without padding --------------------------------------------------------------

Held = tuple[tuple[Shard, int, int], ...]  # (shard, number of ranks, rank) of each axis that shards a dim, in cut order


@functools.lru_cache(4096)
def held_positions(size: int, held: Held) -> torch.Tensor:
    """[rows of a shard in graphs] int64: the global position of each row along a dim, -1 for padding."""
    with without_modes():
        found = torch.arange(1, size + 1)
        for shard, ranks, rank in held:
            found = piece(found, dataclasses.replace(shard, dim=0), ranks, rank)
        return found - 1


@functools.lru_cache(4096)
def real_runs(size: int, held: Held) -> tuple[tuple[int, int], ...]:
    """(first row, rows) of each run of rows that are no padding, in the shard that graphs have."""
    with without_modes():
        real = (held_positions(size, held) >= 0).to(torch.int8)
        edges = torch.diff(real, prepend=real.new_zeros(1), append=real.new_zeros(1)).nonzero()[:, 0].tolist()
    return tuple((start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True))


def _held_by_dim(
    placements: Placements, sizes: Mapping[str, Pieces], coordinate: Mapping[str, int]
) -> dict[int, list[tuple[Shard, int, int]]]:
    """Of the dims that have padding."""
    found: dict[int, list[tuple[Shard, int, int]]] = {}
    for axis, ranks in sizes.items():
        p = placements.get(axis)
        if isinstance(p, Shard) and isinstance(ranks, int):
            found.setdefault(p.dim, []).append((p, ranks, coordinate[axis]))
    return {dim: held for dim, held in found.items() if any(p.units % ranks for p, ranks, _ in held)}


def without_padding(
    x: torch.Tensor,
    shape: Sequence[int],
    placements: Placements,
    sizes: Mapping[str, Pieces],
    coordinate: Mapping[str, int],
) -> torch.Tensor:
    """The stored shard of a global tensor of ``shape``, from the one that graphs have: a view if its rows are
    consecutive."""
    for dim, held in _held_by_dim(placements, sizes, coordinate).items():
        runs = real_runs(shape[dim], tuple(held)) or ((0, 0),)
        parts = [x.narrow(dim, start, rows) for start, rows in runs]
        x = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
    return x


def with_padding(
    x: torch.Tensor,
    shape: Sequence[int],
    placements: Placements,
    sizes: Mapping[str, Pieces],
    coordinate: Mapping[str, int],
) -> torch.Tensor:
    """The inverse of `without_padding`: a copy where this rank's shard has padding, which is zero."""
    for dim, held in _held_by_dim(placements, sizes, coordinate).items():
        local = list(x.shape)
        local[dim] = len(held_positions(shape[dim], tuple(held)))
        if local[dim] != x.shape[dim]:
            runs, padded = real_runs(shape[dim], tuple(held)), x.new_zeros(local)
            for (start, rows), part in zip(runs, x.split([rows for _, rows in runs], dim) if runs else ()):
                padded.narrow(dim, start, rows).copy_(part)
            x = padded
    return x


def stored_piece(
    value: torch.Tensor, placements: Placements, sizes: Mapping[str, Pieces], coordinate: Mapping[str, int]
) -> torch.Tensor:
    """What a rank stores of a global tensor: its shard without padding."""
    found = nested_piece(value, placements, sizes, coordinate)
    return without_padding(found, value.shape, placements, sizes, coordinate)


def stored_shape(
    shape: Sequence[int], placements: Placements, sizes: Mapping[str, Pieces], coordinate: Mapping[str, int]
) -> tuple[int, ...]:
    """The shape of `stored_piece`."""
    out = list(nested_shape(shape, placements, sizes))
    for dim, held in _held_by_dim(placements, sizes, coordinate).items():
        out[dim] = sum(rows for _, rows in real_runs(shape[dim], tuple(held)))
    return tuple(out)

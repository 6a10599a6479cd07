"""Axis names, sizes and coordinates of a mesh. No processes, no process groups: any size works on a laptop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autopar.spelling import did_you_mean
from autopar.values import whole_number

if TYPE_CHECKING:
    from autopar.ir.placement import Pieces  # which loads torch, and command lines are parsed without it

# Outer to inner: neighbours on the innermost axis are neighbours in rank, so tp lands on the fastest links.
# "mb" and "sl" are not axes of ranks: microbatches are shards of the batch in time, token slices shards of the
# sequence; they have placements like any other axis. A slice is split first: it is consecutive global tokens.
AXES = ("pp", "mb", "dp_replicate", "dp", "cp", "ep", "tp", "sl")
IN_TIME = ("mb", "sl")
# Axes whose ranks have different samples: dp has blocks of the batch, dp_replicate (replicas of all that dp shards)
# shards of these, ep (which experts are sharded on) shards of those.
DATA = ("dp", "dp_replicate", "ep")
LEVELLED = ("cp", "ep", "dp", "tp")  # may have levels: neighbours ("ep%8"), every n-th rank ("ep/8")
PLANNED = ("pp", "dp_replicate", "dp", "cp", "ep", "tp")  # the axes that a user may ask for
OTHER_WORDS = {
    "data": "dp", "fsdp": "dp", "tensor": "tp", "model": "tp", "mp": "tp", "pipeline": "pp", "pipe": "pp",
    "stage": "pp", "stages": "pp", "context": "cp", "sequence": "cp", "sp": "cp", "expert": "ep", "experts": "ep",
    "rp": "dp_replicate", "replica": "dp_replicate", "replicate": "dp_replicate", "hsdp": "dp_replicate",
    "dp_shard": "dp",
}  # of others for these axes  # fmt: skip
MOST_RANKS = 2**31 - 1  # torch counts them in 32 bits


@dataclass(frozen=True)
class TokenSlice:
    """Tokens [start, start + length) of ``total``.

    ``tokens``: the name of the input with the ids, if the ``length`` tokens are of any requests, not of one row; then
    ``start`` is the number of tokens whose logits are wanted (`autopar.passes.stage.pack_tokens`).
    """

    length: int
    start: int
    total: int
    tokens: str = ""

    def __post_init__(self) -> None:
        if not (self.length > 0 and self.start >= 0 and self.start + self.length <= self.total):
            raise ValueError(f"token_slices: a slice lies within its {self.total} tokens, found {self}")


def _size(axis: str, size: Any) -> int:
    """The size as an int; numpy's is accepted. Raises ValueError."""
    try:
        found = whole_number(axis, size, least=-math.inf)
    except ValueError:
        shown = f"a {type(size).__name__}" if hasattr(size, "__array__") else repr(size)
        raise ValueError(f"mesh: axis {axis!r} needs a whole number as its size, found {shown}") from None
    if found < 1:
        raise ValueError(f"mesh: axis {axis!r} needs a size of at least 1, found {found}")
    if found > MOST_RANKS:
        many = found if found < 10**25 else "a number of more than 25 digits"
        raise ValueError(f"mesh: axis {axis!r} needs a size of at most {MOST_RANKS} ranks, found {many}; use fewer")
    return found


@dataclass(frozen=True)
class Mesh:
    """Named axes with sizes, in rank order (the last axis varies fastest). ``slice``: graphs on this mesh run this
    token slice."""

    axes: tuple[tuple[str, int], ...]
    slice: TokenSlice | None = None

    def __post_init__(self) -> None:
        for name, _ in self.axes:
            if name not in AXES or name == "sl":
                hint = did_you_mean(name, PLANNED, OTHER_WORDS)
                raise ValueError(f"mesh: unknown axis {name!r}; the axes are {', '.join(PLANNED)}{hint}")
        object.__setattr__(self, "axes", tuple((name, _size(name, size)) for name, size in self.axes))
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise ValueError(f"mesh: an axis is named twice in {names}")
        if self.world_size > MOST_RANKS:
            raise ValueError(f"mesh: {self} needs {self.world_size} ranks, a world has at most {MOST_RANKS}; use fewer")

    @classmethod
    def of(cls, **sizes: int) -> Mesh:
        """``Mesh.of(dp=2, tp=4)``"""
        return cls(tuple(sizes.items()))

    def planned(self) -> Mesh:
        """This mesh. Raises ValueError for axes that nothing is sharded on: every rank would repeat the same work."""
        for name, size in self.axes:
            if name not in PLANNED:
                raise ValueError(
                    f"mesh: nothing is sharded on axis {name!r}, found {name}={size}; the axes are {', '.join(PLANNED)}"
                )
        return self

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """'dp=2,tp=4' -> Mesh.of(dp=2, tp=4)"""
        pairs = []
        for part in filter(None, text.replace(" ", "").split(",")):
            name, equals, size = part.partition("=")
            if not equals or not (size.isascii() and size.isdigit()):
                raise ValueError(f"mesh: expected name=size pairs such as dp=2,tp=4, found {text!r}")
            pairs.append((name, int(size[:26])))  # more digits are no valid size anyway
        return cls(tuple(pairs))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        return dict(self.axes)

    def size(self, axis: str) -> int:
        """Size of an axis; an axis that the mesh lacks has size 1. Levels of an axis count as axes: "cp%4" are four
        neighbours on it, "cp/4" every fourth rank. So do axes joined by commas."""
        if "," in axis:
            return math.prod(map(self.size, axis.split(",")))
        if "%" in axis:
            return int(axis.partition("%")[2])
        name, _, step = axis.partition("/")
        return self.sizes.get(name, 1) // int(step or 1)

    def stride(self, axis: str) -> int:
        """Distance in rank between neighbours on an axis, or on a level of one; of joined axes, on the innermost."""
        if "," in axis:
            return min(map(self.stride, axis.split(",")))
        name, _, step = axis.partition("%")[0].partition("/")
        names = [a for a, _ in self.axes]
        inner = self.axes[names.index(name) + 1 :] if name in names else ()
        return math.prod(size for a, size in inner if a not in IN_TIME) * int(step or 1)

    def pieces(self, axis: str) -> Pieces:
        """The number of shards on an axis: its size. A slice of l of S tokens is one of S/l."""
        if axis == "sl":
            return Fraction(self.slice.total, self.slice.length) if self.slice else 1
        return self.size(axis)

    @property
    def data_size(self) -> int:
        """The number of shards of the batch."""
        return math.prod(map(self.size, DATA))

    def dp_rank_and_size(self, coordinate: Mapping[str, int]) -> int:
        """Which shard of the batch a rank has: dp shards it first, then dp_replicate, then ep."""
        part = 0
        for axis in DATA:
            part = part * self.size(axis) + coordinate.get(axis, 0)
        return part

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.axes)

    @cached_property
    def cut_order(self) -> Mapping[str, Pieces]:
        """Axes that shard, with their `pieces`, in the order in which they do: inner (tp) before outer (dp).

        A later axis shards the result of the earlier ones, so each ``Shard`` of a value refers to the shape
        after the earlier axes of this order.
        """
        return {axis: n for axis in reversed(AXES) if (n := self.pieces(axis)) > 1 and axis != "pp"}

    def __reduce__(self) -> Any:
        return Mesh, (self.axes, self.slice)  # without cached values

    def with_microbatches(self, count: int) -> Mesh:
        """This mesh with microbatches as its outermost axis."""
        return dataclasses.replace(self, axes=(("mb", count), *self.axes)) if count > 1 else self

    def coordinate(self, rank: int) -> dict[str, int]:
        """Mesh coordinate of a rank (row major)."""
        out = {}
        for name, size in reversed(self.axes):
            rank, out[name] = divmod(rank, size)
        return {name: out[name] for name, _ in self.axes}

    def along(self, axes: Sequence[str], rank: int) -> list[int]:
        """The ranks that differ from ``rank`` in their coordinates on ``axes`` only; the first axis varies slowest."""
        here, step, strides = self.coordinate(rank), 1, {}
        for name, size in reversed(self.axes):
            strides[name], step = step, step * size
        known = [name for name in axes if name in strides]
        found = [rank - sum(here[name] * strides[name] for name in known)]
        for name in known:
            found = [first + i * strides[name] for first in found for i in range(self.sizes[name])]
        return found

    def coordinates(self) -> Iterator[Mapping[str, int]]:
        return (self.coordinate(rank) for rank in range(self.world_size))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes) or "1"

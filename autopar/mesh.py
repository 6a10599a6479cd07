"""Axis names, sizes and coordinates of a mesh. No processes, no process groups: any size works on a laptop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# Outer to inner: neighbours on the innermost axis are neighbours in rank, so tp lands on the fastest links.
# "mb" is no axis of ranks: micro-batches are pieces of the batch in time, typed like any other axis.
AXES = ("pp", "mb", "dp", "cp", "ep", "tp")


@dataclass(frozen=True)
class Mesh:
    """Named axes with sizes, in rank order (the last axis varies fastest)."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        for name, size in self.axes:
            if name not in AXES:
                raise ValueError(f"mesh: unknown axis {name!r}; the axes are {', '.join(a for a in AXES if a != 'mb')}")
            if size < 1:
                raise ValueError(f"mesh: axis {name!r} needs a size of at least 1, found {size}")
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise ValueError(f"mesh: an axis is named twice in {names}")

    @classmethod
    def of(cls, **sizes: int) -> Mesh:
        """``Mesh.of(dp=2, tp=4)``"""
        return cls(tuple(sizes.items()))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """'dp=2,tp=4' -> Mesh.of(dp=2, tp=4)"""
        pairs = []
        for part in filter(None, text.replace(" ", "").split(",")):
            name, equals, size = part.partition("=")
            if not equals or not size.isdigit():
                raise ValueError(f"mesh: expected name=size pairs such as dp=2,tp=4, found {text!r}")
            pairs.append((name, int(size)))
        return cls(tuple(pairs))

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    def size(self, axis: str) -> int:
        """Size of an axis; an axis that the mesh lacks has size 1."""
        return self.sizes.get(axis, 1)

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def cut_order(self) -> dict[str, int]:
        """Axes of size above 1 in the order in which they cut tensors: inner (tp) before outer (dp).

        A later axis cuts what the earlier ones left, so each ``Shard`` of a value refers to the shape
        after the earlier axes of this order.
        """
        sizes = self.sizes
        return {axis: sizes[axis] for axis in reversed(AXES) if sizes.get(axis, 1) > 1 and axis != "pp"}

    def with_micro_batches(self, count: int) -> Mesh:
        """This mesh with micro-batches as its outermost axis."""
        return Mesh((("mb", count), *self.axes)) if count > 1 else self

    def coordinate(self, rank: int) -> dict[str, int]:
        """Mesh coordinate of a rank (row major)."""
        out = {}
        for name, size in reversed(self.axes):
            rank, out[name] = divmod(rank, size)
        return {name: out[name] for name, _ in self.axes}

    def coordinates(self) -> Iterator[Mapping[str, int]]:
        return (self.coordinate(rank) for rank in range(self.world_size))

    def group_of(self, axis: str, rank: int) -> list[int]:
        """The ranks that share every coordinate with ``rank`` but that of ``axis``, in axis order."""
        here = self.coordinate(rank)
        return [
            r for r in range(self.world_size) if all(v == here[a] for a, v in self.coordinate(r).items() if a != axis)
        ]

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes) or "1"

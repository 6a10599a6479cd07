"""What the runtime must know of a parameter to hold its piece: name, whole shape, placements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement, nested_shape


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter: ``shape`` is that of the whole tensor, ``placements`` how it is *stored* per mesh axis.

    ``aliases`` are further names of the same (tied) parameter. An axis that is absent stores it whole. ``ranks``: the
    coordinates on pp that hold it, its owner first; several for a weight that several parts use.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    aliases: tuple[str, ...] = ()
    placements: dict[str, Placement] = field(default_factory=dict)
    ranks: tuple[int, ...] = (0,)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Shape of one rank's piece."""
        return nested_shape(self.shape, self.placements, mesh.cut_order)

    def nbytes(self, mesh: Mesh | None = None) -> int:
        """Bytes of the whole tensor, or of one rank's piece when a mesh is given."""
        shape = self.shape if mesh is None else self.local_shape(mesh)
        return math.prod(shape) * self.dtype.itemsize


def in_buckets(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Numbers of what is taken together, in order: up to ``most`` bytes, or one that is larger."""
    found: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if not found or size > room:
            found.append([])
            room = most
        found[-1].append(i)
        room -= size
    return found

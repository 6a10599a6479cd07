"""Inputs and outputs of a captured graph: kinds, names, and aliases of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar import ops as ops  # registers the operators that adapters put into models
from autopar.capture.module_state.assigned import Assignment, BufferAlias
from autopar.capture.trace.export import unflatten
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement, Shard, nested_shape, stored_shape, with_padding, without_padding

PRESENT = "present"  # kind and name of the input that says how many microbatches take part in a step


@dataclass(frozen=True)
class InputSpec:
    """One placeholder: ``kind`` is parameter, buffer, constant, input, seed or `PRESENT`; ``name`` the original fully
    qualified name, or the path of the input ("input_ids", "past.0"); ``aliases`` further names tied to it;
    ``persistent``: whether a buffer is in the state dict."""

    node: str
    kind: str
    name: str
    aliases: tuple[str, ...] = ()
    requires_grad: bool = False
    persistent: bool = True


@dataclass(frozen=True)
class OutputSpec:
    """One output: ``kind`` "output" with the path in the user's structure ("loss", "hidden_states.1"), or "mutation"
    with the name of the buffer whose new value this is: to be copied into its tensor, or, if it was ``assigned``, to
    replace its tensor. ``alias``: where an output is a view of a buffer, which it may be without being written to."""

    kind: str
    name: str
    assigned: bool = False
    alias: BufferAlias | None = None


@dataclass(frozen=True)
class Signature:
    """Inputs in placeholder order, outputs in the order of the graph's output tuple (outputs before mutations).

    asks_grad_mode: whether the forward has asked if gradients are enabled, and may behave differently if not.
    assigned: the buffers to which the forward binds other tensors. differentiated: those that would get a gradient if
    they required one. unkept: (path of a module, attribute) that the forward sets besides buffers, which steps do not
    set. recomputed: parameters, buffers and constants that the forward reads within `torch.utils.checkpoint`, whose
    backward reads them a second time; None: there is no checkpoint. memos: (where, value as text) that the forward
    stores where nothing was, and may use in its next call. values: (buffer, its bytes in hexadecimal digits) of those
    whose values the forward has read."""

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    # The user's structure: its spec, and per leaf the place in `outputs` or the constant to restore.
    spec: Any = field(default=None, repr=False, compare=False)
    leaves: tuple[int | ConstantLeaf, ...] = field(default=(), repr=False)
    asks_grad_mode: bool = False
    assigned: tuple[Assignment, ...] = ()
    differentiated: tuple[str, ...] = ()
    unkept: tuple[tuple[str, str], ...] = ()
    recomputed: tuple[str, ...] | None = None
    memos: tuple[tuple[str, str], ...] = ()
    values: tuple[tuple[str, str], ...] = ()

    def rebuild(self, values: Sequence[Any]) -> Any:
        """Flat "output" values (tensors or anything else) -> the user's structure, with None and constant leaves."""
        filled = [leaf.value if isinstance(leaf, ConstantLeaf) else values[leaf] for leaf in self.leaves]
        return unflatten(filled, self.spec)


@dataclass(frozen=True)
class ConstantLeaf:
    """A leaf of the user's structure that is not a value of the graph."""

    value: Any


# --- parameters ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter: ``shape`` is the global one, ``placements`` how it is *stored* per mesh axis.

    ``aliases`` are further names of the same (tied) parameter. An axis that is absent replicates it. ``ranks``: the
    coordinates on pp that hold it, its owner first; several for a weight that several stages use.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    aliases: tuple[str, ...] = ()
    placements: dict[str, Placement] = field(default_factory=dict)
    ranks: tuple[int, ...] = (0,)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Shape of one rank's shard in graphs, padding included."""
        return nested_shape(self.shape, self.placements, mesh.cut_order)

    def stored_shape(self, mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the shard that the rank at a coordinate stores."""
        return stored_shape(self.shape, self.placements, mesh.cut_order, coordinate)

    def padded(self, x: torch.Tensor, mesh: Mesh, coordinate: Mapping[str, int]) -> torch.Tensor:
        """The shard that graphs take, from the stored one of the rank at a coordinate: a copy if it has padding."""
        return with_padding(x, self.shape, self.placements, mesh.cut_order, coordinate)

    def cropped(self, x: torch.Tensor, mesh: Mesh, coordinate: Mapping[str, int]) -> torch.Tensor:
        """The inverse of `padded`, for a gradient."""
        return without_padding(x, self.shape, self.placements, mesh.cut_order, coordinate)

    @property
    def is_padded(self) -> bool:
        """Whether shards of some ranks have padding in graphs."""
        return any(isinstance(p, Shard) and p.units for p in self.placements.values())

    def nbytes(self, mesh: Mesh | None = None) -> int:
        """Bytes of the global tensor, or of one rank's shard when a mesh is given."""
        shape = self.shape if mesh is None else self.local_shape(mesh)
        return math.prod(shape) * self.dtype.itemsize


def in_buckets(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Indices of what shares a bucket, in order: up to ``most`` bytes, or one that is larger."""
    found: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if not found or size > room:
            found.append([])
            room = most
        found[-1].append(i)
        room -= size
    return found

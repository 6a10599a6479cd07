"""What goes into a captured graph and what comes out: kinds, names, and aliases of parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar import ops as ops  # registers the operators that adapters put into models
from autopar.capture.module_state.assigned import Assignment, Lying
from autopar.capture.trace.export import unflatten
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement, nested_shape


@dataclass(frozen=True)
class InputSpec:
    """One placeholder: ``kind`` is parameter, buffer, constant, input or seed; ``name`` the original fully qualified
    name, or the path of the input ("input_ids", "past.0"); ``aliases`` further names tied to it; ``persistent``
    tells of a buffer whether it is in the state dict."""

    node: str
    kind: str
    name: str
    aliases: tuple[str, ...] = ()
    requires_grad: bool = False
    persistent: bool = True


@dataclass(frozen=True)
class OutputSpec:
    """One output: ``kind`` "output" with the path in the user's structure ("loss", "hidden_states.1"), or "mutation"
    with the name of the buffer whose new value this is: to be written into its tensor, or, if it was ``assigned``, to
    be its tensor. ``lying``: where an output lies in a buffer's memory, as it may without being written to."""

    kind: str
    name: str
    assigned: bool = False
    lying: Lying | None = None


@dataclass(frozen=True)
class Signature:
    """Inputs in placeholder order, outputs in the order of the graph's output tuple (outputs before mutations).

    asks_grad_mode: whether the forward has asked if there are gradients, and may do something else if not. assigned:
    the buffers to which the forward binds other tensors. differentiated: those through which a gradient would flow, if
    they were part of a graph of autograd. unkept: (path of a module, attribute) of what the forward sets beside
    buffers, which nobody will find there. remade: parameters, buffers and constants that the forward reads within
    `torch.utils.checkpoint`, whose backward reads them again; None: there is no checkpoint. memos:
    (where, as text what) the forward keeps where nothing was, and may compute with in the next one."""

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    # The user's structure: its spec, and per leaf the place in `outputs` or the constant to restore.
    spec: Any = field(default=None, repr=False, compare=False)
    leaves: tuple[int | ConstantLeaf, ...] = field(default=(), repr=False)
    asks_grad_mode: bool = False
    assigned: tuple[Assignment, ...] = ()
    differentiated: tuple[str, ...] = ()
    unkept: tuple[tuple[str, str], ...] = ()
    remade: tuple[str, ...] | None = None
    memos: tuple[tuple[str, str], ...] = ()

    def rebuild(self, values: Sequence[Any]) -> Any:
        """Flat "output" values (tensors or anything else) -> the user's structure, with None and constant leaves."""
        filled = [leaf.value if isinstance(leaf, ConstantLeaf) else values[leaf] for leaf in self.leaves]
        return unflatten(filled, self.spec)


@dataclass(frozen=True)
class ConstantLeaf:
    """A leaf of the user's structure that is no value of the graph."""

    value: Any


# --- parameters ----------------------------------------------------------------------------------------


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

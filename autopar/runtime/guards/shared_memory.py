"""Memory of the original model that somebody holds beside it: the parallel model's tensors lie there, as in torch.

    t = torch.zeros(4); model.register_buffer("count", t)       a step writes to count, and so to t
    weight = nn.Parameter(table); model.weight = weight         the optimizer's steps are seen in table
    state = model.state_dict(); model = parallelize(model, ..)  so they are in state
    weight = nn.Parameter(torch.from_numpy(array))              and in array

So memory is taken back at once for tensors in whose memory somebody has another one when `parallelize` is called: the
original model is trained there, too. All other tensors of the original do not change while it is there. Once the module
that had them is gone and the memory is not, somebody else has it. An array keeps its memory without a sign of it, so
that of tensors that may have been made of one is taken back in any case. A piece of a weight that is cut over the mesh
cannot lie there: this is told in a warning, and who writes there is refused once the original model is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from autopar.adapters.autograd import version_of
from autopar.adapters.tensors.first_words import sampled_words, value_of
from autopar.adapters.tensors.held_memory import StoragePlace, move_to, of_array, own_piece
from autopar.capture.side_effects.unusual import warn_of
from autopar.runtime.params.sharded_modules import ShardedModules

_TAKEN = WeakIdKeyDictionary()  # tensors of originals in whose memory those of a parallel model lie


def is_taken_back(x: Tensor) -> bool:
    """Whether a tensor of a parallel model lies in the memory of this one, of the original."""
    return x in _TAKEN


class SharedMemory:
    """Of the model that was parallelized. ``held``: names of tensors that somebody holds besides."""

    def __init__(self, model: nn.Module, tree: ShardedModules, held: Collection[str]) -> None:
        self._tree, self._gone = tree, False
        self._left: list[_Left] = []
        self._cut: list[_Left] = []
        self.buffers: set[str] = set()  # that lie in memory which somebody else has, too
        aliases = {name: spec.name for spec in tree.specs for name in (spec.name, *spec.aliases)}
        buffers = tree.buffers()
        seen = set[int]()
        for path, module in model.named_modules():
            owner = weakref.ref(module, self._left_one)
            for name, x in (*module._parameters.items(), *module._buffers.items()):
                full = f"{path}.{name}" if path else name
                there = aliases.get(full, full)
                own: Any = tree.held.get(there, buffers.get(full))
                if x is None or own is None or x.is_meta or id(own) in seen or not _lies_plain(x):
                    continue
                seen.add(id(own))
                kept = full in held
                self._left.append(_Left(full, there, owner, x, own, kept))
        self._take_back([one for one in self._left if one.at_once])
        self._left = [one for one in self._left if not one.at_once or one in self._cut]

    def _left_one(self, _: Any) -> None:
        self._gone = True

    def look(self) -> None:
        """At a step: whether a module of the original is gone, and its tensors are not. Raises ValueError for writes
        to such as cannot be taken back."""
        if self._gone:
            self._gone = False
            gone = [one for one in self._left if one.owner() is None]
            self._left = [one for one in self._left if one.owner() is not None]
            self._take_back(gone)
        for one in self._cut:
            if one.is_written():
                raise ValueError(
                    f"parallelize: somebody wrote to the memory of {one.name} of the original model, which does not "
                    f"reach the mesh, where {one.name} is cut or lies elsewhere; write to {one.name} of the parallel "
                    "model, or load the values into it"
                )

    def _take_back(self, found: list[_Left]) -> None:
        own = {**self._tree.held, **self._tree.buffers()} if found else {}
        taken = {one: one.take_back(own.get(one.there)) for one in found}
        self.buffers |= {one.there for one, done in taken.items() if done and one.there not in self._tree.held}
        cut = [one for one, done in taken.items() if done is False]
        new = [one for one in cut if one not in self._cut]
        self._cut += new
        if new:
            warn_of(
                f"parallelize: somebody holds a tensor that lies in the memory of {new[0].name} of the original, and "
                "is not written to by steps on the mesh, where it is cut or lies elsewhere; read it from the parallel "
                "model",
                stacklevel=4,
            )


class _Left:
    """A tensor of the original, weakly, and that of the parallel model, which stands under the name ``there``."""

    def __init__(
        self, name: str, there: str, owner: Callable[[], Any], original: Tensor, own: Tensor, at_once: bool
    ) -> None:
        self.name, self.there, self.owner, self.at_once = name, there, owner, at_once
        piece = own_piece(own)
        alike = piece.shape == original.shape and piece.device == original.device
        self._memory = StoragePlace(original, at_once or (alike and of_array(original)))
        self._original, self._number, self._version = weakref.ref(original), id(own), version_of(piece)
        self._words: list[int] | None = None

    def take_back(self, own: Tensor | None) -> bool | None:
        """``own``: what the parallel model has there now. False for memory that is held and cannot be taken back."""
        memory = self._memory.tensor()
        if memory is None or own is None or id(own) != self._number:
            self._memory.free()
            return None
        piece: Tensor = own_piece(own)
        if memory.device != piece.device or memory.dtype != piece.dtype:
            self._memory.free()
            return None  # as torch's own model.to(device) leaves it behind
        fits = memory.is_contiguous() if own.requires_grad else all(memory.stride())
        if fits or memory.shape != piece.shape:  # else an array, which may have it, is watched
            self._memory.free()
        if memory.shape != piece.shape or not fits:
            return False if own.requires_grad or 0 not in memory.stride() else None  # nobody can write to such a one
        move_to(piece, memory, version_of(piece) != self._version)
        if (x := self._original()) is not None:
            _TAKEN[x] = True
        return True

    def is_written(self) -> bool:
        """Whether somebody has written there since this was first asked when the original was gone."""
        memory = self._memory.tensor() if self.owner() is None else None
        if memory is None:
            return False
        order = sorted(range(memory.dim()), key=memory.stride, reverse=True)
        words = list(map(value_of, sampled_words(memory.permute(order))))
        self._words = words if self._words is None else self._words
        return words != self._words


def _lies_plain(x: Tensor) -> bool:
    return x.layout == torch.strided and x.numel() > 0 and not x.is_inference()

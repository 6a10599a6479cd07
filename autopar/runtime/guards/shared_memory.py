"""Memory of the original model that user code holds as well: the parallel model uses the same memory, as in torch.

    t = torch.zeros(4); model.register_buffer("count", t)       a step writes to count, and so to t
    weight = nn.Parameter(table); model.weight = weight         table shows the optimizer's steps
    state = model.state_dict(); model = parallelize(model, ..)  so does state
    weight = nn.Parameter(torch.from_numpy(array))              so does array

If user code holds another tensor in a parameter's memory when `parallelize` is called, the parallel model uses this
memory at once; steps then change the original model, too. All other tensors of the original stay unchanged while it is
alive. If their module is gone and their memory is not, user code still holds it, and the parallel model moves there.
A NumPy array does not show that it holds memory, so the memory of tensors that may come from one is always used. A
shard of a weight cannot use the memory of the full weight: a warning says so, and writes to that memory are refused
once the original model is gone.
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

_TAKEN = WeakIdKeyDictionary()  # tensors of originals whose memory a parallel model uses


def is_taken_back(x: Tensor) -> bool:
    """Whether a parallel model uses the memory of this tensor of the original."""
    return x in _TAKEN


class SharedMemory:
    """Of the original ``model``. ``held``: names of tensors that user code holds beside the model."""

    def __init__(self, model: nn.Module, tree: ShardedModules, held: Collection[str]) -> None:
        self._tree, self._gone = tree, False
        self._left: list[_Left] = []
        self._cut: list[_Left] = []
        self.buffers: set[str] = set()  # names of those in memory that user code holds, too
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
        """At a step: find modules of the original that are gone while their tensors are not. Raises ValueError for
        writes to memory that the parallel model cannot use."""
        if self._gone:
            self._gone = False
            gone = [one for one in self._left if one.owner() is None]
            self._left = [one for one in self._left if one.owner() is not None]
            self._take_back(gone)
        for one in self._cut:
            if one.is_written():
                raise ValueError(
                    f"parallelize: the memory of {one.name} of the original model was written to, which does not reach "
                    f"the parallel model, where {one.name} is sharded or on another device; write to {one.name} of the "
                    "parallel model, or load the values into it"
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
                f"parallelize: another tensor shares the memory of {new[0].name} of the original model, and steps do "
                "not update it, since the parameter is sharded or on another device; read the values from the parallel "
                "model",
                stacklevel=4,
            )


class _Left:
    """A tensor of the original, held weakly. ``there``: the name of its counterpart in the parallel model."""

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
        """``own``: the parallel model's tensor. False for memory that user code holds and a shard cannot use."""
        memory = self._memory.tensor()
        if memory is None or own is None or id(own) != self._number:
            self._memory.free()
            return None
        piece: Tensor = own_piece(own)
        if memory.device != piece.device or memory.dtype != piece.dtype:
            self._memory.free()
            return None  # as torch's model.to(device) does, too
        fits = memory.is_contiguous() if own.requires_grad else all(memory.stride())
        if fits or memory.shape != piece.shape:  # else watch it: an array may hold it
            self._memory.free()
        if memory.shape != piece.shape or not fits:
            return False if own.requires_grad or 0 not in memory.stride() else None  # an expanded tensor is read-only
        move_to(piece, memory, version_of(piece) != self._version)
        if (x := self._original()) is not None:
            _TAKEN[x] = True
        return True

    def is_written(self) -> bool:
        """Whether the memory was written to since the first call after the original was gone."""
        memory = self._memory.tensor() if self.owner() is None else None
        if memory is None:
            return False
        order = sorted(range(memory.dim()), key=memory.stride, reverse=True)
        words = list(map(value_of, sampled_words(memory.permute(order))))
        self._words = words if self._words is None else self._words
        return words != self._words


def _lies_plain(x: Tensor) -> bool:
    return x.layout == torch.strided and x.numel() > 0 and not x.is_inference()

"""Storages of tensors: noted without being kept alive, and taken for another tensor."""

from __future__ import annotations

import sys
import weakref
from collections import Counter

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.adapters.dtensor import local_of


class StoragePlace:
    """Where a tensor lies, as long as somebody holds its storage; with ``keep`` until `free`."""

    def __init__(self, x: Tensor, keep: bool = False) -> None:
        self._weak = weakref.ref(x.untyped_storage())
        self._kept = x.untyped_storage() if keep else None
        self._lying = x.storage_offset(), x.shape, x.stride()
        self.dtype, self.device, self.is_contiguous = x.dtype, x.device, x.is_contiguous()

    def free(self) -> None:
        """Do not keep the storage any longer."""
        self._kept = None

    def tensor(self) -> Tensor | None:
        """One that lies there, if the storage is still there."""
        storage = self._weak()
        if storage is None:
            return None
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, *self._lying)


def own_piece(x: Tensor) -> Tensor:
    """A tensor itself; of a DTensor what this rank has."""
    return local_of(x) if isinstance(x, DTensor) else x


@torch.no_grad()
def move_to(piece: Tensor, memory: Tensor, with_values: bool) -> None:
    """From now on a tensor lies where ``memory`` does. Its values come along, or are those that are there."""
    if with_values:
        memory.copy_(piece)
    piece.data = memory


def held_elsewhere(model: nn.Module) -> set[str]:
    """Names of parameters and buffers whose memory somebody has beside the modules: an entry of a state dict, the
    tensor that a parameter was made of, a numpy view. Of buffers also: the tensor itself, the one that it is a view of,
    or the array that it was made of."""
    return _held_buffers(model) | _aliased(model)


def _aliased(model: nn.Module) -> set[str]:
    """Names of tensors in whose storages more tensors lie than the model has there."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    plain = [(name, x) for name, x in named if x.layout == torch.strided and not x.is_meta]
    own = {id(x): x for _, x in plain}
    own |= {id(x._base): x._base for x in own.values() if x._base is not None}
    there = Counter(x.untyped_storage()._cdata for x in own.values())
    storages = ((name, x.untyped_storage()._cdata) for name, x in plain)
    return {name for name, number in storages if torch._C._storage_Use_Count(number) - 1 > there[number]}  # 1: Python's


def _held_buffers(model: nn.Module) -> set[str]:
    buffers = dict(model.named_buffers(remove_duplicate=False))
    entries = [id(b) for b in buffers.values()]
    times = {number: entries.count(number) for number in entries} if len({*entries}) < len(entries) else {}
    entries.clear()
    held = set[str]()
    for name in list(buffers):
        b = buffers.pop(name)
        references = sys.getrefcount(b) - 2 - times.get(id(b), 1)
        rest = sum(x is b for x in buffers.values()) if times else 0
        base = b._base
        if references > rest or (base is not None and sys.getrefcount(base) > 2) or of_array(b):
            held.add(name)
    return held


def of_array(x: Tensor) -> bool:
    """Whether its memory is not torch's: a numpy array's, for example."""
    own = x.device.type == "cpu" and x.layout == torch.strided and x.numel() > 0
    return own and not x.untyped_storage().resizable()

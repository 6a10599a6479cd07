"""Storages of tensors: weak references to them, replacing them, and finding other references to them."""

from __future__ import annotations

import sys
import weakref
from collections import Counter

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.adapters.dtensor import local_of


class StoragePlace:
    """A weak reference to the storage of a tensor, with its layout; with ``keep`` a strong one, until `free`."""

    def __init__(self, x: Tensor, keep: bool = False) -> None:
        self._weak = weakref.ref(x.untyped_storage())
        self._kept = x.untyped_storage() if keep else None
        self._layout = x.storage_offset(), x.shape, x.stride()
        self.dtype, self.device, self.is_contiguous = x.dtype, x.device, x.is_contiguous()

    def free(self) -> None:
        """Drop the strong reference."""
        self._kept = None

    def tensor(self) -> Tensor | None:
        """A tensor in that storage, or None if the storage is gone."""
        storage = self._weak()
        if storage is None:
            return None
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, *self._layout)


def own_piece(x: Tensor) -> Tensor:
    """The tensor itself; of a DTensor the local shard."""
    return local_of(x) if isinstance(x, DTensor) else x


@torch.no_grad()
def move_to(piece: Tensor, memory: Tensor, with_values: bool) -> None:
    """Make ``memory`` the storage of a tensor. Its values are copied there, or replaced by those of ``memory``."""
    if with_values:
        memory.copy_(piece)
    piece.data = memory


def referenced_elsewhere(model: nn.Module) -> set[str]:
    """Names of parameters and buffers whose memory is referenced from outside of the modules: by an entry of a state
    dict, the tensor that a parameter was made from, or a numpy view; for buffers also by a reference to the tensor
    itself, to its base, or to the array that it was made from."""
    return _referenced_buffers(model) | _aliased(model)


def _aliased(model: nn.Module) -> set[str]:
    """Names of tensors whose storages have more references than tensors of the model."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    plain = [(name, x) for name, x in named if x.layout == torch.strided and not x.is_meta]
    own = {id(x): x for _, x in plain}
    own |= {id(x._base): x._base for x in own.values() if x._base is not None}
    there = Counter(x.untyped_storage()._cdata for x in own.values())
    storages = ((name, x.untyped_storage()._cdata) for name, x in plain)
    return {
        name for name, number in storages if torch._C._storage_Use_Count(number) - 1 > there[number]
    }  # 1: the Python object


def _referenced_buffers(model: nn.Module) -> set[str]:
    buffers = dict(model.named_buffers(remove_duplicate=False))
    entries = [id(b) for b in buffers.values()]
    times = {number: entries.count(number) for number in entries} if len({*entries}) < len(entries) else {}
    entries.clear()
    referenced = set[str]()
    for name in list(buffers):
        b = buffers.pop(name)
        references = sys.getrefcount(b) - 2 - times.get(id(b), 1)
        rest = sum(x is b for x in buffers.values()) if times else 0
        base = b._base
        if references > rest or (base is not None and sys.getrefcount(base) > 2) or of_array(b):
            referenced.add(name)
    return referenced


def of_array(x: Tensor) -> bool:
    """Whether a tensor uses memory that torch did not allocate, such as that of a numpy array."""
    own = x.device.type == "cpu" and x.layout == torch.strided and x.numel() > 0
    return own and not x.untyped_storage().resizable()

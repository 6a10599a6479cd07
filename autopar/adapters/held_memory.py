"""Storages of tensors: noted without being kept alive, and taken for another tensor."""

from __future__ import annotations

import sys
import weakref

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
    """Names of buffers that somebody has beside the modules: the tensor, the one that it is a view of, or the array
    that it was made of."""
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
        if references > rest or (base is not None and sys.getrefcount(base) > 2) or _of_array(b):
            held.add(name)
    return held


def _of_array(x: Tensor) -> bool:
    """Whether its memory is not torch's: a numpy array's, for example."""
    own = x.device.type == "cpu" and x.layout == torch.strided and x.numel() > 0
    return own and not x.untyped_storage().resizable()

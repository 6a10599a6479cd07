"""Values of small buffers that nothing writes, which a forward may read: they become part of the graph, and a guard.

    if self.prob[i] < 1:                         answered from the buffer's value
    F.pad(x, (left, self.stride - rest))         its number

A forward that would be refused for reading a value is captured again with them. Steps hold as long as the buffers that
it has read have the same bytes; a buffer that the forward writes is none of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from autopar.adapters.copying.fake import with_values
from autopar.adapters.dispatch import without_modes

MOST = 64  # elements of a buffer that may be read


def bytes_of(x: Tensor) -> str:
    """The content of a buffer, in hexadecimal digits."""
    with without_modes():
        x = x.detach().cpu().contiguous().flatten()
        return str(x.dtype) + bytes(x.view(torch.uint8).numpy()).hex()


class BufferValues:
    """Of a model whose forward is captured, perhaps several times. ``asked``: name -> `bytes_of` the buffers whose
    values the forward has read."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = {name: b for name, b in model.named_buffers(remove_duplicate=False) if _real(b) is not None}
        self._known: dict[int, tuple[Tensor, int, str]] = {}  # id -> (traced buffer, its version, name)
        self._on = self._wanted = False
        self.asked: dict[str, str] = {}

    def begin(self, replica: nn.Module) -> None:
        """Before the forward of a structure copy."""
        self.asked = {}
        named = replica.named_buffers(remove_duplicate=False) if self._buffers else ()
        self._known = {id(b): (b, b._version, name) for name, b in named if name in self._buffers}

    def has(self, x: Tensor) -> bool:
        """Whether a traced tensor is such a buffer, as it was before the forward."""
        found = self._known.get(id(x))
        return found is not None and found[1] == x._version

    def value(self, x: Tensor) -> Tensor | None:
        """The values of a traced buffer, on the CPU."""
        if not self.has(x):
            return None
        self._wanted = True
        name = self._known[id(x)][2]
        real = _real(self._buffers[name]) if self._on else None
        if real is None:
            return None
        self.asked[name] = bytes_of(real)
        with without_modes():
            return real.detach().to("cpu", x.dtype)

    def again(self) -> bool:
        """Whether a capture that was refused may succeed with values."""
        before, self._on = self._on, self._on or self._wanted
        return self._on and not before

    def leave(self, written: Iterable[str]) -> bool:
        """Leave out buffers that the forward writes to. Returns whether it has read the value of one."""
        found = self.asked.keys() & {*written}
        self._buffers = {name: b for name, b in self._buffers.items() if name not in found}
        return bool(found)


def has_bytes(x: Any, text: str) -> bool:
    """Whether a buffer has this content."""
    real = _real(x) if isinstance(x, Tensor) else None
    return real is not None and bytes_of(real) == text


def _real(x: Tensor) -> Tensor | None:
    """A small plain buffer, or the one that it stands for."""
    found = with_values(x)
    plain = type(found) is Tensor and found.layout == torch.strided and not found.is_meta
    return found if plain and found.numel() <= MOST else None

"""Copies between the host and a device, without the host waiting; and values that wait in host memory between F and B:
`autopar::to_host` and `autopar::from_host` as they run.

On a GPU each direction has a stream of its own, and buffers are pinned. On a CPU copies are made at once; the arena
then stands for another memory, which `HostArena` meters.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """On the device, contiguous. From the host to a GPU it goes through pinned memory, so that the host does not wait:
    of a tensor that is pinned already (``DataLoader(pin_memory=True)``) there is no other copy, and it must stay as it
    is until it is there, as with ``x.to(device, non_blocking=True)``."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device).contiguous()
    whole = x.contiguous()  # here: strided copies between devices are made by waiting
    return (whole if whole.is_pinned() else whole.pin_memory()).to(device, non_blocking=True)


def to_host(x: Tensor) -> tuple[Tensor, torch.Event | None]:
    """(a tensor on the host, what says that its values are there). None: they are."""
    if x.device.type == "cpu":
        return x, None
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    return host, torch.accelerator.current_stream().record_event()


@dataclass
class _Buffer:
    """Bytes in host memory. written, read: when the last copy into it, and out of it, is done (None: it is)."""

    bytes: Tensor
    written: torch.Event | None = None
    read: torch.Event | None = None


class HostArena:
    """Buffers in host memory, which come back once nobody has the tensor in them, and are lent out again.

    lent: bytes that tensors take now; most: the most so far; held: bytes of all buffers.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned, self._lock = pinned, threading.RLock()
        self._free: dict[int, list[_Buffer]] = {}
        self.lent_out: dict[int, _Buffer] = {}  # by address
        self.lent = self.most = self.held = 0

    def like(self, x: Tensor) -> tuple[Tensor, _Buffer]:
        """A tensor of the shape, strides and dtype of a dense one, and the buffer that it lies in."""
        size = x.numel() * x.itemsize
        with self._lock:
            free = self._free.get(size)
            buffer = free.pop() if free else self._new(size)
            self.lent += size
            self.most = max(self.most, self.lent)
            self.lent_out[buffer.bytes.data_ptr()] = buffer
            made = torch.empty(0, dtype=x.dtype)
            made.set_(buffer.bytes.untyped_storage(), 0, x.shape, x.stride())
        weakref.finalize(made, self._give, buffer, size)
        return made, buffer

    def holds(self, x: Tensor) -> bool:
        """Whether a tensor lies in a buffer of the arena."""
        return x.untyped_storage().data_ptr() in self.lent_out

    def _new(self, size: int) -> _Buffer:
        self.held += size
        return _Buffer(torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=self._pinned))

    def _give(self, buffer: _Buffer, size: int) -> None:
        with self._lock:
            self.lent -= size
            del self.lent_out[buffer.bytes.data_ptr()]
            self._free.setdefault(size, []).append(buffer)


@dataclass
class _HostCopy:
    """A copy on its way. source: stays until it has arrived."""

    made: Tensor
    source: Tensor
    arrived: torch.Event | None = None


class OffloadBuffers:
    """Copies of one device."""

    def __init__(self, device: torch.device) -> None:
        self.arena = HostArena(device.type == "cuda")
        self._device = device
        self._out, self._in = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))

    @staticmethod
    def on(device: torch.device) -> OffloadBuffers:
        """Those of a device: one arena for all steps of a process."""
        return _OF_DEVICES.get(device) or _OF_DEVICES.setdefault(device, OffloadBuffers(device))

    def arrived(self) -> None:
        """Until all copies are done: before the host reads what lies in its memory, or writes there."""
        for stream in (self._out, self._in):
            if stream is not None:
                stream.synchronize()

    def to_host(self, x: Tensor) -> _HostCopy:
        made, buffer = self.arena.like(x)
        if self._out is None:
            made.copy_(x)
            return _HostCopy(made, x)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        buffer.written = _copied(self._out, made, x, buffer.read)
        return _HostCopy(made, x, buffer.written)

    def from_host(self, x: Tensor) -> _HostCopy:
        """Start the way back, into new memory of the stream that computes."""
        buffer, made = self.arena.lent_out[x.untyped_storage().data_ptr()], torch.empty_like(x, device=self._device)
        if self._in is None:
            made.copy_(x)
            return _HostCopy(made, x)
        self._in.wait_stream(torch.cuda.current_stream(self._device))  # the memory may have had another user
        buffer.read = _copied(self._in, made, x, buffer.written)
        return _HostCopy(made, x, buffer.read)

    def finish(self, pending: _HostCopy) -> Tensor:
        """What was copied: whatever the device does from here on finds it there."""
        if pending.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(pending.arrived)
        return pending.made


_OF_DEVICES: dict[torch.device, OffloadBuffers] = {}


def host_copies_arrived() -> None:
    """Until the host may read and write what waits in its memory, whichever device it is of."""
    for copies in _OF_DEVICES.values():
        copies.arrived()


def _copied(stream: Any, made: Tensor, x: Tensor, behind: torch.Event | None) -> Any:
    """A copy on a stream, behind an earlier use of the buffer; when it is done."""
    if behind is not None:
        stream.wait_event(behind)
    with torch.cuda.stream(stream):
        made.copy_(x, non_blocking=True)
    return stream.record_event()

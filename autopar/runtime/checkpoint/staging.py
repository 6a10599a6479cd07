"""Writing a file of tensors while training goes on: copies in waves, within a limit of host memory.

    pieces   | a  a  a | a  b  b | b  b  c | ...
    copies   [slot 1   ][slot 2  ][slot 1 ...       a slot is filled as soon as one has been written
    file               |a a a    |a b b   |...

If the host memory holds all pieces, copying never waits for the disk. With less memory, code that changes a piece waits
(`StagedFile.staged`) until the rest has been written and all is copied.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from autopar.runtime.checkpoint.memory_folder import free_memory
from autopar.runtime.checkpoint.storage_layout import BlockChecksums, host_bytes
from autopar.runtime.checkpoint.tensor_storage import Piece

WAVE = 32 * 2**20  # bytes of a slot


class Slots:
    """Host memory for copies: buffers of `WAVE` bytes, up to ``limit`` bytes but at least two buffers. They are kept
    for the next save: a fresh page costs more than a copy. ``pinned``: for copies from a GPU."""

    def __init__(self, limit: int, pinned: bool) -> None:
        self._left, self._pinned = max(2, limit // WAVE), pinned
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def take(self) -> Tensor:
        """Take a buffer; waits for one if the limit is reached."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            if self._left == 0:
                return self._free.get()
            self._left -= 1
            return torch.empty(WAVE, dtype=torch.uint8, pin_memory=self._pinned)

    def give(self, slot: Tensor) -> None:
        self._free.put(slot)


@functools.lru_cache(maxsize=1)
def slots_of(limit: int | None, pinned: bool) -> Slots:
    """The slots of this process. None: half of the memory free now, shared by the processes of this machine."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Slots(free_memory() // 2 // local if limit is None else limit, pinned)


class StagedFile:
    """A file that is being written: ``head``, then the pieces. The constructor creates the file, so that an OSError is
    raised at once. ``slots``: buffers for copies; None: pieces do not change meanwhile and are written without a copy.
    sums: checksums of what has been written."""

    def __init__(self, path: Path, head: bytes, pieces: Sequence[Piece], slots: Slots | None) -> None:
        self._file = path.open("xb", buffering=0)
        self._head, self._pieces, self._slots = head, pieces, slots
        self.sums = BlockChecksums()
        self._filled: queue.SimpleQueue[tuple[Tensor, int, torch.Event | None] | None] = queue.SimpleQueue()
        self.staged = threading.Event()
        self._error: BaseException | None = None
        self._broken = False
        on_gpu = next((p.values.device for p in pieces if p.values.is_cuda), None)
        self._stream = torch.cuda.Stream(on_gpu) if on_gpu is not None else None
        if self._stream is not None:  # after the work queued so far
            self._stream.wait_stream(torch.cuda.current_stream(on_gpu))

    def run(self) -> None:
        """Write and sync everything. Raises OSError, and RuntimeError for a piece that changed before it was copied."""
        try:
            self._write(memoryview(self._head))
            if self._slots is None:
                for flat in self._bytes():
                    for part in flat.split(WAVE):
                        self._write(host_bytes(part))
            else:
                self._write_copies(self._slots)
            os.fsync(self._file.fileno())
        finally:
            self.staged.set()
            self._file.close()
            self._pieces = ()

    def close(self) -> None:
        """Give the file up without writing it."""
        self.staged.set()
        self._file.close()

    def _bytes(self) -> Iterator[Tensor]:
        for piece in self._pieces:
            if piece.values.numel():
                yield piece.values.detach().contiguous().reshape(-1).view(torch.uint8)

    def _write_copies(self, slots: Slots) -> None:
        copies = threading.Thread(target=self._copy_all, args=(slots,), name="autopar-stage")
        copies.start()
        try:
            while (found := self._filled.get()) is not None:
                slot, count, there = found
                try:
                    if not self._broken:
                        if there is not None:
                            there.synchronize()
                        self._write(host_bytes(slot[:count]))
                except BaseException:
                    self._broken = True  # stop copying without waiting for the disk
                    raise
                finally:
                    slots.give(slot)
        finally:
            while self._broken and (left := self._filled.get()) is not None:
                slots.give(left[0])
            copies.join()
        if self._error is not None:
            raise self._error

    def _copy_all(self, slots: Slots) -> None:
        """Runs on a separate thread: copies pieces into slots and passes slots to the writer; None at the end."""
        try:
            if self._stream is None:
                self._copy(slots)
            else:
                with torch.cuda.stream(self._stream):
                    self._copy(slots)
                self._stream.synchronize()
            changed = next((p.key for p in self._pieces if p.changed()), None)
            if changed is not None:
                raise RuntimeError(f"{changed} was written to while it was being saved; call wait() before that")
        except BaseException as error:  # the writer raises it
            self._error = error
        finally:
            self._filled.put(None)
            self.staged.set()

    def _copy(self, slots: Slots) -> None:
        slot, used = slots.take(), 0
        for flat in self._bytes():
            at = 0
            while at < flat.numel() and not self._broken:
                count = min(WAVE - used, flat.numel() - at)
                slot[used : used + count].copy_(flat[at : at + count], non_blocking=self._stream is not None)
                at, used = at + count, used + count
                if used == WAVE:
                    self._hand_over(slot, used)
                    slot, used = slots.take(), 0
        self._hand_over(slot, used)

    def _hand_over(self, slot: Tensor, used: int) -> None:
        there = self._stream.record_event() if self._stream is not None else None
        self._filled.put((slot, used, there))

    def _write(self, data: memoryview) -> None:
        self.sums.add(data)
        while data:
            data = data[self._file.write(data) :]

"""The storage layout of a checkpoint's tensors, checked before anything is read: the manifest, the heads of the files,
and checksums of the blocks of a file, which detect a flipped bit when it is read.

A manifest is untrusted input, so all of it is checked; errors are ValueErrors in the style of `load`. CRC-32 (ISO 3309,
as in gzip) of a block of 4 MiB misses one change in 2**32, and none that spans 32 bits or less.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from autopar.files import opened_plain
from autopar.runtime.checkpoint.json_tree import dtype_called
from autopar.values import parse

BLOCK = 4 * 2**20  # bytes; the last block of a file has fewer


class BlockChecksums:
    """Checksums of the blocks of a file that is being written, from start to end."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._sum = self._size = 0

    def add(self, data: memoryview) -> None:
        while data:
            part = data[: BLOCK - self._size]
            self._sum, self._size = zlib.crc32(part, self._sum), self._size + len(part)
            data = data[len(part) :]
            if self._size == BLOCK:
                self._done.append(self._sum)
                self._sum = self._size = 0

    @property
    def found(self) -> list[int]:
        return self._done + ([self._sum] if self._size else [])


def host_bytes(x: Tensor) -> memoryview:
    """The bytes of a uint8 [n] tensor on the host, without a copy."""
    data: Any = x.numpy()
    return memoryview(data)


def checksum(block: Tensor) -> int:
    """Of a block, as a uint8 tensor on the host."""
    return zlib.crc32(host_bytes(block))


def check_blocks(data: memoryview, start: int, stop: int, sums: Sequence[int], known: set[int]) -> int | None:
    """The first byte of a block whose checksum differs, of those that contain the bytes from ``start`` to ``stop``;
    None if all match. ``known``: blocks that have been checked before."""
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        if block not in known:
            at = block * BLOCK
            if block >= len(sums) or zlib.crc32(data[at : at + BLOCK]) != sums[block]:
                return at
            known.add(block)
    return None


# --- the manifest ----------------------------------------------------------------------------------------------------


SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_MOST = 2**62  # of a size, or an offset in a file


@dataclass(frozen=True)
class SavedPiece:
    """A box of a tensor that begins at ``start``, stored in a file from byte ``at`` on."""

    file: str
    at: int
    start: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """The entry of a tensor in the manifest."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    told: Any  # the entries of its pieces, not checked yet

    @staticmethod
    def of(key: str, told: Any) -> SavedTensor:
        """Raises ValueError."""
        if not isinstance(told, dict):
            raise ValueError(f"{key} is {told!r:.40}, needs a dtype, a shape and pieces")
        return SavedTensor(key, dtype_called(told.get("dtype", "")), _sizes(key, told.get("shape")), told.get("pieces"))

    def pieces(self) -> list[SavedPiece]:
        """The pieces. Raises ValueError unless they cover every element of the tensor exactly once."""
        found = self.listed()
        if sum(math.prod(piece.sizes) for piece in found) != math.prod(self.shape) or _overlap(found):
            raise ValueError(f"the pieces of {self.key} do not cover a tensor of shape {self.shape} exactly once")
        return found

    def listed(self) -> list[SavedPiece]:
        """The pieces, which may be a part of them. Raises ValueError."""
        if not isinstance(self.told, list):
            raise ValueError(f"{self.key} has no pieces")
        return [self._piece(told) for told in self.told]

    def _piece(self, told: Any) -> SavedPiece:
        if not isinstance(told, list) or len(told) != 4 or not isinstance(told[0], str):
            raise ValueError(f"a piece of {self.key} is {told!r:.60}, needs a file, a place, a start and sizes")
        (at,), start, sizes = (_sizes(self.key, x) for x in ([told[1]], *told[2:]))
        if len(start) != len(self.shape) or len(sizes) != len(self.shape):
            raise ValueError(f"a piece of {self.key} has other dims than {self.shape}")
        if any(first + size > whole for first, size, whole in zip(start, sizes, self.shape, strict=True)):
            raise ValueError(f"a piece of {self.key} reaches beyond its shape {self.shape}")
        return SavedPiece(told[0], at, start, sizes)


def _sizes(key: str, found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(type(n) is int and 0 <= n <= _MOST for n in found):
        raise ValueError(f"{key} has {found!r:.60}, needs integers of at least 0")
    return tuple(found)


def _overlap(pieces: Sequence[SavedPiece]) -> bool:
    """Whether two pieces overlap: compares pieces that overlap in the dim with the most starts."""
    filled = [piece for piece in pieces if 0 not in piece.sizes]
    dims = range(len(filled[0].start)) if len(filled) > 1 else ()
    if not dims:
        return len(filled) > 1
    dim = max(dims, key=lambda d: len({piece.start[d] for piece in filled}))
    going: list[SavedPiece] = []
    for piece in sorted(filled, key=lambda piece: piece.start[dim]):
        going = [other for other in going if other.start[dim] + other.sizes[dim] > piece.start[dim]]
        for a in going:
            if all(
                a.start[d] < piece.start[d] + piece.sizes[d] and piece.start[d] < a.start[d] + a.sizes[d] for d in dims
            ):
                return True
        going.append(piece)
    return False


# --- files ----------------------------------------------------------------------------------------------------


def opened_inside(folder: Path, name: str) -> IO[bytes]:
    """Open a regular file in a folder for reading, without following links. Raises ValueError for a name that leads
    out of the folder, OSError for anything but a regular file."""
    if not name or "\0" in name or Path(name).name != name:
        raise ValueError(f"load: {folder} names {name!r}, which is not one of its files")
    return opened_plain(folder / name)


def piece_name(key: str, is_whole: bool, start: Iterable[int]) -> str:
    """The name of a piece in the head of its file."""
    return key if is_whole else f"{key}@{','.join(map(str, start))}"


def check_head(file: IO[bytes], size: int, pieces: Iterable[tuple[SavedTensor, SavedPiece]]) -> str:
    """How the head of a file (of ``size`` bytes) differs from these pieces, as a text; "" if it does not."""
    (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
    if length > size - 8:
        return "its head is longer than the file"
    try:
        head = parse(file.read(length).decode())
    except ValueError as error:
        return f"its head cannot be read: {error}"
    for tensor, piece in pieces:
        name = piece_name(tensor.key, piece.sizes == tensor.shape, piece.start)
        nbytes = math.prod(piece.sizes) * tensor.dtype.itemsize
        shape = list(piece.sizes) if tensor.dtype in SAFETENSORS else [nbytes]
        begin = piece.at - 8 - length
        needed = {"dtype": SAFETENSORS.get(tensor.dtype, "U8"), "shape": shape, "data_offsets": [begin, begin + nbytes]}
        found = head.get(name) if isinstance(head, dict) else None
        if found != needed or begin < 0 or piece.at + nbytes > size:
            return f"its head has another {name} than the manifest"
    return ""

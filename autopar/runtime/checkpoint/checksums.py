"""Sums of the blocks of a file: a bit that has flipped on a disk or on a wire is found where it is read.

    sums = BlockChecksums(); sums.add(data) ...         while a file is written, in any portions; sums.found
    check_blocks(data, 100, 300, sums, known)      while parts of it are read: the blocks of these bytes, each once

CRC-32 (ISO 3309, as in gzip): of a block of 4 MiB it misses one in 2**32 changes, and none of 32 bits or less in a row.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

BLOCK = 4 * 2**20  # bytes; the last block of a file has fewer


class BlockChecksums:
    """Of a file that is being written, from its begin to its end."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._sum = self._size = 0

    def add(self, data: memoryview) -> None:
        """The next bytes."""
        while data:
            part = data[: BLOCK - self._size]
            self._sum, self._size = zlib.crc32(part, self._sum), self._size + len(part)
            data = data[len(part) :]
            if self._size == BLOCK:
                self._done.append(self._sum)
                self._sum = self._size = 0

    @property
    def found(self) -> list[int]:
        """Of each block so far."""
        return self._done + ([self._sum] if self._size else [])


def check_blocks(data: memoryview, start: int, stop: int, sums: Sequence[int], known: set[int]) -> int | None:
    """The first byte of a block that differs from its sum, of those that the bytes from ``start`` to ``stop`` lie in;
    None: none does. ``known``: blocks that have been found right before."""
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        if block not in known:
            at = block * BLOCK
            if block >= len(sums) or zlib.crc32(data[at : at + BLOCK]) != sums[block]:
                return at
            known.add(block)
    return None

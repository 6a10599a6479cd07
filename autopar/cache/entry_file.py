"""A file of the cache: a line with the digest of the rest, a line of facts, then sections.

    autopar cache 1 <digest of all that follows>
    {"about": {"model": "LlamaForCausalLM", ...}, "sections": [["main", 120, 4096], ...]}
    <compressed bytes>

Read whole, and only as it was written: what is torn, changed, of another format or another person's is none.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_MAGIC = b"autopar cache 1 "
_LARGEST = 1 << 31  # bytes, packed or not
_DIGEST = 40  # characters


class StoredEntry(NamedTuple):
    """``about``: facts for lists. ``sections``: by name, unpacked."""

    about: dict[str, Any]
    sections: Mapping[str, bytes]


class _Sections(dict[str, bytes]):
    """Unpacked when they are asked for. Raises KeyError for one that cannot be."""

    def __init__(self, packed: Mapping[str, tuple[bytes, int]]) -> None:
        super().__init__()
        self._packed = packed

    def __contains__(self, name: object) -> bool:
        return name in self._packed

    def __missing__(self, name: str) -> bytes:
        data, size = self._packed[name]
        unpacker = zlib.decompressobj()
        try:
            made = unpacker.decompress(data, max(size, 1))  # and never more
        except zlib.error as error:
            raise KeyError(name) from error
        if len(made) != size or unpacker.unconsumed_tail or not unpacker.eof:
            raise KeyError(name)
        return made


def packed_entry(about: Mapping[str, Any], sections: Mapping[str, bytes]) -> bytes:
    """The bytes of a file."""
    bodies = [(name, zlib.compress(data, 1), len(data)) for name, data in sections.items()]
    head = {"about": dict(about), "sections": [[name, len(body), size] for name, body, size in bodies]}
    rest = b"".join([json.dumps(head).encode(), b"\n", *(body for _, body, _ in bodies)])
    return _MAGIC + _digest(rest) + b"\n" + rest


def unpacked_entry(data: bytes) -> StoredEntry | None:
    """The inverse of `packed_entry`; None for what that never gives."""
    first, line, rest = data.partition(b"\n")
    if not line or not first.startswith(_MAGIC) or first[len(_MAGIC) :] != _digest(rest):
        return None
    head = _head(rest)
    if head is None:
        return None
    packed: dict[str, tuple[bytes, int]] = {}
    at = rest.index(b"\n") + 1
    for name, length, size in head["sections"]:
        if not 0 <= length <= len(rest) - at or not 0 <= size <= _LARGEST:
            return None
        packed[name] = rest[at : at + length], size
        at += length
    return StoredEntry(head["about"], _Sections(packed)) if at == len(rest) else None


def _head(rest: bytes) -> dict[str, Any] | None:
    line, end, _ = rest.partition(b"\n")
    try:
        head = json.loads(line) if end else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(head, dict) or not isinstance(head.get("about"), dict):
        return None
    rows = head.get("sections")
    fits = isinstance(rows, list) and all(
        isinstance(row, list) and [type(x) for x in row] == [str, int, int] for row in rows
    )
    return head if fits else None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST // 2).hexdigest().encode()


def read_entry(path: Path) -> StoredEntry | None:
    """The file's entry; None where there is none of this user's."""
    data = _bytes_of(path, _LARGEST)
    return unpacked_entry(data) if data is not None else None


def read_about(path: Path) -> dict[str, Any] | None:
    """Only the facts, without a look at the rest."""
    data = _bytes_of(path, 1 << 16)
    if data is None or not data.startswith(_MAGIC):
        return None
    head = _head(data.partition(b"\n")[2])
    return head["about"] if head is not None else None


def _bytes_of(path: Path, most: int) -> bytes | None:
    """The first bytes of a plain file that belongs to this user; no link is followed."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError):
        return None
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        os.close(handle)
        return None
    with os.fdopen(handle, "rb") as file:
        try:
            return file.read(most)
        except (OSError, MemoryError):
            return None

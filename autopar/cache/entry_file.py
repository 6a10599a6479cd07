"""A file of the cache: a line with a signature, a line with a header, then sections.

    autopar cache 2 <HMAC-SHA256 of the file name and of the rest>
    {"about": {"model": "LlamaForCausalLM", ...}, "sections": [["main", 120, 4096], ...]}
    <compressed bytes>

A file that is truncated, changed, renamed, of another format, or not signed with the user's key is ignored.
"""

from __future__ import annotations

import hmac
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from autopar.files import opened_plain

_MAGIC = b"autopar cache 2 "
_LARGEST = 1 << 31  # bytes, compressed or not


class StoredEntry(NamedTuple):
    """about: description for lists. sections: decompressed bytes by name."""

    about: dict[str, Any]
    sections: Mapping[str, bytes]


class _Sections(dict[str, bytes]):
    """Sections that are decompressed at first use. Raises KeyError for a damaged one."""

    def __init__(self, packed: Mapping[str, tuple[bytes, int]]) -> None:
        super().__init__()
        self._packed = packed

    def __contains__(self, name: object) -> bool:
        return name in self._packed

    def __missing__(self, name: str) -> bytes:
        data, size = self._packed[name]
        unpacker = zlib.decompressobj()
        try:
            made = unpacker.decompress(data, max(size, 1))  # bounded, so that a damaged file cannot fill memory
        except (zlib.error, MemoryError) as error:
            raise KeyError(name) from error
        if len(made) != size or unpacker.unconsumed_tail or not unpacker.eof:
            raise KeyError(name)
        return made


def packed_entry(secret: bytes, name: str, about: Mapping[str, Any], sections: Mapping[str, bytes]) -> bytes:
    """The contents of a file of this name."""
    bodies = [(section, zlib.compress(data, 1), len(data)) for section, data in sections.items()]
    head = {"about": dict(about), "sections": [[section, len(body), size] for section, body, size in bodies]}
    rest = b"".join([json.dumps(head).encode(), b"\n", *(body for _, body, _ in bodies)])
    return _MAGIC + _signature(secret, name, rest) + b"\n" + rest


def unpacked_entry(secret: bytes, name: str, data: bytes) -> StoredEntry | None:
    """The inverse of `packed_entry`; None for invalid data."""
    first, line, rest = data.partition(b"\n")
    if not line or not hmac.compare_digest(first, _MAGIC + _signature(secret, name, rest)):
        return None
    head = _head(rest)
    if head is None:
        return None
    packed: dict[str, tuple[bytes, int]] = {}
    at, sizes = rest.index(b"\n") + 1, 0
    for section, length, size in head["sections"]:
        if not 0 <= length <= len(rest) - at or not 0 <= size <= _LARGEST - sizes:
            return None
        packed[section] = rest[at : at + length], size
        at, sizes = at + length, sizes + size
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


def _signature(secret: bytes, name: str, data: bytes) -> bytes:
    signed = hmac.new(secret, f"{name}\n".encode(), "sha256")
    signed.update(data)
    return signed.hexdigest().encode()


def read_entry(secret: bytes, path: Path) -> StoredEntry | None:
    """Read an entry; None if there is no valid one of this user."""
    data = _bytes_of(path)
    return unpacked_entry(secret, path.stem, data) if data is not None else None


def _bytes_of(path: Path) -> bytes | None:
    """The contents of a regular file that belongs to this user; links are not followed."""
    try:
        with opened_plain(path) as file:
            own = os.fstat(file.fileno()).st_uid == os.getuid()
            return file.read(_LARGEST) if own else None
    except (OSError, ValueError, MemoryError):
        return None

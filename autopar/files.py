"""Files that are there whole or not at all, whenever a process dies: written beside, on the disk, then renamed.

And plain files of a folder: somebody who may write there must not make us read another file instead.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

OFF = ("0", "off", "no", "false")  # values of a variable that names a folder, for none


def cache_root() -> Path | None:
    """The folder for this user's caches; None without a home."""
    caches = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(caches) if caches else Path.home() / ".cache") / "autopar"
    except RuntimeError:  # no home folder
        return None


def sync_path(path: Path) -> None:
    """Wait until a file, or the list of a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(file: Path | int, data: str | bytes) -> None:
    """A new file, of a path or an open handle; it is on the disk then."""
    with open(file, "wb") as out:
        out.write(data.encode() if isinstance(data, str) else data)
        out.flush()
        os.fsync(out.fileno())


@contextlib.contextmanager
def written_beside(folder: Path, data: bytes, prefix: str) -> Iterator[str]:
    """Within: the path of a file in a folder that is on the disk, for its owner alone, to be renamed or linked; else it
    is removed. Raises OSError."""
    handle, name = tempfile.mkstemp(prefix=prefix, dir=folder)
    try:
        write_synced(handle, data)
        yield name
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def opened_plain(path: Path) -> IO[bytes]:
    """A plain file, to be read; no link is followed, and nothing is waited for. Raises OSError for what is none,
    ValueError for what can be no path."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is no plain file")
    return os.fdopen(handle, "rb")

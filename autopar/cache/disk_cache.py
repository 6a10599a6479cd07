"""The folder of the compile cache, shared by all ranks and jobs of a user: `AUTOPAR_CACHE`, or ~/.cache/autopar.

    folder = entry_folder()                        None: the cache is off
    with folder.turn(key):                         one process compiles, others wait for its entry
        entry = folder.read(key) ...
        folder.write(key, about, sections)

Files are written under a temporary name and renamed, so a reader sees all of a file or nothing. Failures of the cache
never fail a step: with a full or read-only disk the next process compiles, too. Files are signed with a key of the user
in the folder. A folder that others may write to is not used, with one warning.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from autopar.cache.entry_file import StoredEntry, packed_entry, read_entry
from autopar.files import OFF, cache_root, written_beside
from autopar.private_folder import keep_others_out, user_key, why_no_key, why_not_own, why_unsafe

log = logging.getLogger("autopar.cache")

VARIABLE, SIZE_VARIABLE = "AUTOPAR_CACHE", "AUTOPAR_CACHE_SIZE"
DEFAULT_SIZE = 2 << 30  # bytes
PATIENCE = 300.0  # seconds to wait for another rank's compilation
_POLL = 0.02  # seconds
_OLD = 3600.0  # seconds after which an unfinished file is removed
_FORGOTTEN = 30 * 86400.0  # seconds after which files beside entries are removed
_VERSION = "steps-2"
_BESIDE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # flags to open a file beside an entry
_KEY = re.compile(r"[0-9a-f]{40}")


class ListedEntry(NamedTuple):
    """An entry in a list. used: time of the last use, in seconds since 1970; hits: how often it was read."""

    key: str
    about: dict[str, Any]
    nbytes: int
    used: float
    hits: int


class DiskCache:
    """A cache folder. ``size``: largest total size of the entries in bytes."""

    def __init__(self, path: Path, size: int = DEFAULT_SIZE) -> None:
        self.path, self.size = path, size
        self._files = path / _VERSION

    def read(self, key: str) -> StoredEntry | None:
        """Read an entry and mark it as used; None if there is no valid one."""
        path, secret = self._path(key), user_key(self._files)
        entry = read_entry(secret, path) if secret is not None else None
        if entry is None:
            return None
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)
            self._append(key, ".hits", b".")
        return entry

    def _append(self, key: str, suffix: str, data: bytes) -> None:
        """Append to a file beside an entry, without following links. Raises OSError."""
        handle = os.open(self._path(key).with_suffix(suffix), _BESIDE | os.O_APPEND, 0o600)
        try:
            os.write(handle, data)
        finally:
            os.close(handle)

    def write(self, key: str, about: Mapping[str, Any], sections: Mapping[str, bytes]) -> bool:
        """Write an entry; returns whether it was stored. Evicts the least recently used entries if there is no room."""
        try:
            self._make()
            secret = user_key(self._files, make=True)
            if secret is None:
                log.debug("not stored: %s", why_no_key(self._files))
                return False
            data = packed_entry(secret, key, about, sections)
            if len(data) > self.size:
                log.debug("not stored: %d bytes exceed %s", len(data), SIZE_VARIABLE)
                return False
            with written_beside(self._files, data, "unfinished-") as name:
                os.replace(name, self._path(key))
            self._make_room()
            return True
        except OSError as error:
            log.debug("not stored: %s", error)
            return False

    @contextlib.contextmanager
    def turn(self, key: str) -> Iterator[bool]:
        """Context manager around a compilation, one process at a time: waits while another process compiles this entry,
        until it is done or dead, or the entry is there. Yields whether it did not wait; a process that has waited does
        not hold the lock."""
        handle = self._lock(key)
        if handle is None:
            yield True
            return
        try:
            waited = self._wait(handle, self._path(key))
            yield not waited
        finally:
            with contextlib.suppress(OSError):
                # a forked process has the file open, too, so closing does not unlock
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def _wait(self, handle: int, path: Path) -> bool:
        """Wait for the lock; returns whether another process had it, in which case it is released again."""
        end, waited, before = time.monotonic() + PATIENCE, False, _file_at(path)
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if waited:
                    fcntl.flock(handle, fcntl.LOCK_UN)
                return waited
            except BlockingIOError:
                waited = True
            except OSError:  # the file system has no locks
                return False
            if _file_at(path) != before or time.monotonic() > end:
                return True
            time.sleep(_POLL)

    def _lock(self, key: str) -> int | None:
        try:
            self._make()
            return os.open(self._path(key).with_suffix(".lock"), _BESIDE, 0o600)
        except OSError:
            return None

    def refuse(self, key: str) -> None:
        """Mark a key whose result cannot be stored, so that processes do not wait for each other."""
        with contextlib.suppress(OSError):
            self._make()
            self._append(key, ".never", b"")

    def is_refused(self, key: str) -> bool:
        return self._path(key).with_suffix(".never").exists()

    def entries(self) -> list[ListedEntry]:
        """All valid entries, the last used one first."""
        found, secret = [], user_key(self._files)
        if secret is None:
            return []
        for path, facts in self._stats(".step"):
            entry, hits = read_entry(secret, path), 0
            with contextlib.suppress(OSError):
                hits = path.with_suffix(".hits").stat().st_size
            if entry is not None:
                found.append(ListedEntry(path.stem, entry.about, facts.st_size, facts.st_mtime, hits))
        return sorted(found, key=lambda entry: -entry.used)

    def clear(self) -> tuple[int, int]:
        """Remove all entries; returns their number and total bytes."""
        entries = list(self._stats(".step"))
        for path, _ in self._stats(""):
            with contextlib.suppress(OSError):
                path.unlink()
        return len(entries), sum(facts.st_size for _, facts in entries)

    def _make_room(self) -> None:
        found = sorted(self._stats(".step"), key=lambda pair: pair[1].st_mtime)
        left = sum(facts.st_size for _, facts in found)
        for path, facts in found:
            if left <= self.size:
                break
            for suffix in (".step", ".hits", ".lock", ".never"):
                with contextlib.suppress(OSError):
                    path.with_suffix(suffix).unlink()
            left -= facts.st_size
        for path, facts in self._stats(""):
            age, unfinished = time.time() - facts.st_mtime, path.name.startswith("unfinished-")
            if (unfinished and age > _OLD) or (path.suffix in (".never", ".lock") and age > _FORGOTTEN):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _stats(self, suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
        """Files of the cache with a suffix (all: "")."""
        try:
            with os.scandir(self._files) as entries:
                paths = [Path(entry.path) for entry in entries]
        except OSError:
            return
        for path in paths:
            known = _KEY.fullmatch(path.stem) is not None or path.name.startswith("unfinished-")
            if known and (not suffix or path.suffix == suffix):
                with contextlib.suppress(OSError):
                    yield path, path.lstat()

    def _path(self, key: str) -> Path:
        assert _KEY.fullmatch(key), "a key is a digest"
        return self._files / f"{key}.step"

    def _make(self) -> None:
        """Create the folders for this user alone, whatever the umask."""
        if not self._files.is_dir():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self.path, self._files):
                folder.mkdir(mode=0o700, exist_ok=True)

    def why_refused(self) -> str:
        """Why the folder cannot be trusted; "" if it can."""
        return why_unsafe(self.path) or why_not_own(self._files) or why_no_key(self._files)


def _file_at(path: Path) -> int | None:
    """The inode of a file, or None."""
    try:
        return path.lstat().st_ino
    except OSError:
        return None


def entry_folder() -> DiskCache | None:
    """The cache that environment variables describe; None if it is off, or, with a warning, if others may write to it.
    Raises ValueError for an invalid size."""
    given = os.environ.get(VARIABLE, "")
    if given.lower() in OFF:
        return None
    path = Path(given).expanduser() if given else cache_root()
    if path is None:
        return None
    if not given:
        keep_others_out(path)
    found = DiskCache(path, _size(os.environ.get(SIZE_VARIABLE, "")))
    if why := found.why_refused():
        _refuse(why)
        return None
    return found


@functools.cache
def _refuse(why: str) -> None:
    """Warn once."""
    warnings.warn(
        f"cache: compiled steps are neither read nor stored, since {why}; remove the access of others (chmod go-w, and "
        f"delete a key that others may have read), or set {VARIABLE} to a private folder, or to 0",
        stacklevel=3,
    )


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _size(text: str) -> int:
    if not text:
        return DEFAULT_SIZE
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ValueError(f"{SIZE_VARIABLE}: expected bytes such as 2e9, 500M or 2G, found {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])

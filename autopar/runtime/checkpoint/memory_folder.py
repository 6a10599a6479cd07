"""Checkpoints in the host memory of a node: files in /dev/shm, which outlive the processes that wrote them.

    /dev/shm/autopar-1000/              of this user alone; $AUTOPAR_MEMORY names another folder
      5f0c.../                          of a run: the token in the file .memory of its folder
        00000012-9ab3c1d2.00003.tensors     what rank 3 wrote of generation 12: a safetensors file
        00000012-9ab3c1d2.00003.json        its part of the manifest, which comes last

A part without a manifest whose checksum is right does not exist. A generation is complete if some node has a part of
each of its ranks. At most two generations of a rank are kept: the newest complete one, and the one that is being
written, into the pages of the one before: a fresh page costs more than a copy. No torch here.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from errno import ENOMEM
from pathlib import Path
from typing import IO, Any, NamedTuple

from autopar.files import opened_plain, write_synced
from autopar.private_folder import why_unsafe
from autopar.runtime.checkpoint.checkpoint_dir import checked_text, with_sum
from autopar.runtime.checkpoint.storage_layout import opened_inside
from autopar.values import parse

VARIABLE, TOKEN_FILE = "AUTOPAR_MEMORY", ".memory"
FORMAT = 1
MOST_RANKS = 2**20
_TOKEN = re.compile(r"[0-9a-f]{32}", re.ASCII)
_FILE = re.compile(r"((\d{8,})-[0-9a-f]{8})\.(\d{5,})\.(tensors|json|next)", re.ASCII)
_ABANDONED = 24 * 3600.0  # seconds without a write after which the files of another run are removed
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Part(NamedTuple):
    """The part of one rank of a generation. ranks: how many parts the generation has. after: the number of the newest
    checkpoint on disk when it was saved."""

    order: int
    generation: str
    rank: int
    ranks: int
    after: int


def memory_root() -> Path:
    """The folder for memory checkpoints of this user."""
    given = os.environ.get(VARIABLE, "")
    return Path(os.path.abspath(given)) if given else Path("/dev/shm") / f"autopar-{os.getuid()}"


def node_name() -> str:
    """A text that is equal on ranks which see the same folder. Makes the folder. Raises OSError if that fails, or if
    others may write to it."""
    root = memory_root()
    with contextlib.suppress(FileExistsError):
        root.mkdir(0o700)
    if why := why_unsafe(root):
        raise OSError(f"{why}; set {VARIABLE} to a folder in memory that only you may write to")
    facts = root.stat()
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{boot} {facts.st_dev} {facts.st_ino}"


# --- the token: a file in the folder of the run ----------------------------------------------------------------


def token_of(run_folder: Path) -> str:
    """The token of a run; "" if it has none: without the folder of the run its memory checkpoints do not count."""
    with contextlib.suppress(OSError, ValueError), opened_inside(run_folder, TOKEN_FILE) as file:
        said = file.read(100).decode().strip()
        return said if _TOKEN.fullmatch(said) else ""
    return ""


def write_token(run_folder: Path, token: str) -> None:
    """Give a run its token. Raises OSError."""
    beside = run_folder / f"{TOKEN_FILE}.next"
    run_folder.mkdir(parents=True, exist_ok=True)
    write_synced(beside, f"{token}\n")
    os.replace(beside, run_folder / TOKEN_FILE)


# --- the folder of a run ---------------------------------------------------------------------------------------


@dataclass
class MemoryFolder:
    """The memory checkpoints of a run on this node."""

    token: str
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder = memory_root() / self.token

    # --- writing ----------------------------------------------------------------------------------------------

    def reserve(self, generation: str, rank: int, size: int, keep: str) -> mmap.mmap:
        """The file of a part, ``size`` bytes of memory that are taken now: a write into a page that is missing would
        end the process. Older parts of the rank, except those of the generation ``keep``, are removed, or become this
        one. Raises OSError if there is no room, or others may write to the folder."""
        node_name()
        self.folder.mkdir(0o700, exist_ok=True)
        path, reused = self._path(generation, rank, "tensors"), None
        for old in self._files():
            if old.rank == rank and old.generation != keep:
                if old.kind == "tensors" and reused is None and old.path.stat().st_size == size:
                    self._path(old.generation, rank, "json").unlink(missing_ok=True)
                    os.rename(old.path, path)
                    reused = path
                elif old.path.exists():
                    old.path.unlink()
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(path, flags if reused else flags | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if reused is None:
                _check_room(size)
                os.posix_fallocate(handle, 0, size)
            return mmap.mmap(handle, size)
        except OSError as error:
            path.unlink()
            raise OSError(error.errno, f"{error.strerror} ({size / 1e9:.2f} GB in {self.folder})") from error
        finally:
            os.close(handle)

    def finish(self, generation: str, rank: int, manifest: bytes) -> None:
        """Write the manifest of a part: it exists from now on. Raises OSError."""
        path = self._path(generation, rank, "json")
        beside = path.with_suffix(".next")
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(manifest)
        os.replace(beside, path)

    def remove_strangers(self, keep: Collection[str], ranks: Collection[int]) -> None:
        """Remove what other ranks than these have left on the node, except some generations: a rank that moved, or a
        start with more ranks."""
        for old in self._files():
            if old.rank not in ranks and old.generation not in keep:
                old.path.unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- reading ----------------------------------------------------------------------------------------------

    def parts(self) -> list[Part]:
        """The parts on this node; damaged ones do not count."""
        found = []
        for file in self._files():
            if file.kind == "json":
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    told = self.manifest(file.generation, file.rank)
                    with self.opened(file.generation, file.rank) as tensors:
                        whole = os.fstat(tensors.fileno()).st_size == told["size"]
                    numbers = file.order, file.rank, told["ranks"], told["after"]
                    if whole and all(type(n) is int for n in numbers) and file.rank < told["ranks"] <= MOST_RANKS:
                        found.append(Part(file.order, file.generation, *numbers[1:]))
        return found

    def manifest(self, generation: str, rank: int) -> dict[str, Any]:
        """What a part tells of itself. Raises OSError, ValueError if it is damaged."""
        return read_part(self.manifest_bytes(generation, rank), generation, rank)

    def manifest_bytes(self, generation: str, rank: int) -> bytes:
        with opened_inside(self.folder, self._path(generation, rank, "json").name) as file:
            return file.read()

    def opened(self, generation: str, rank: int) -> IO[bytes]:
        """The file of a part, for reading. Raises OSError."""
        return opened_plain(self._path(generation, rank, "tensors"))

    # --- files ------------------------------------------------------------------------------------------------

    def _path(self, generation: str, rank: int, kind: str) -> Path:
        return self.folder / f"{generation}.{rank:05d}.{kind}"

    def _files(self) -> list[_File]:
        with contextlib.suppress(OSError):
            if not (why_unsafe(self.folder.parent) or why_unsafe(self.folder)):
                return [*_files_in(self.folder)]
        return []


class _File(NamedTuple):
    order: int
    generation: str
    rank: int
    kind: str
    path: Path


def _files_in(folder: Path) -> Iterable[_File]:
    for path in sorted(folder.iterdir()):
        if (said := _FILE.fullmatch(path.name)) is not None:
            yield _File(int(said[2]), said[1], int(said[3]), said[4], path)


def _check_room(size: int) -> None:
    """Raises OSError unless all ranks of the node can take ``size`` bytes: the kernel would end a process otherwise."""
    local, free = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), free_memory()
    if size * local > free:
        need = f"{size * local / 1e9:.2f} GB of memory for {local} ranks"
        raise OSError(ENOMEM, f"needs {need}, the node has {free / 1e9:.2f} GB left")


def free_memory() -> int:
    """Bytes of available host memory, as reported by the system."""
    file = Path("/proc/meminfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 8 * 2**30)


def part_bytes(generation: str, rank: int, facts: Mapping[str, Any]) -> bytes:
    """The manifest of a part, with a checksum of itself."""
    return with_sum(json.dumps({"format": FORMAT, "generation": generation, "rank": rank, **facts}))


def read_part(written: bytes, generation: str, rank: int) -> dict[str, Any]:
    """The manifest of a part. Raises ValueError unless it is the one that was written."""
    found = parse(checked_text(written))
    head = [found.get(name) for name in ("format", "generation", "rank")] if isinstance(found, dict) else []
    if head != [FORMAT, generation, rank]:
        raise ValueError("it is of another part, or of another version of autopar")
    return dict(found)


def remove_abandoned(token: str) -> None:
    """Remove what runs other than this one have left on the node a day ago or earlier."""
    with contextlib.suppress(OSError):
        for folder in memory_root().iterdir():
            last = max((path.stat().st_mtime for path in (folder, *folder.iterdir())), default=0.0)
            if _TOKEN.fullmatch(folder.name) and folder.name != token and time.time() - last > _ABANDONED:
                shutil.rmtree(folder, ignore_errors=True)

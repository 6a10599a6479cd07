"""The folder of a run: complete checkpoints, the name of the latest one, and a checkpoint that is being written.

    run/step-00000100/            a checkpoint: files of tensors, and `checkpoint.json`, its manifest
    run/step-00000200/
    run/latest                    "step-00000200": the one to load
    run/.saving-step-00000300/    being written, or left by an interrupted save

A checkpoint is written in this order, each line synced before the next begins, so that a process may die between any
two of them:

    .saving-NAME/*.tensors        written by all ranks
    .saving-NAME/checkpoint.json  the manifest: a folder without it is not a checkpoint
    .saving-NAME -> NAME          one rename
    latest.next -> latest         atomic: from now on this checkpoint is loaded
    older ones                    removed, if only some are kept: renamed to .saving-NAME first

Only rank 0 does this. No torch here.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from autopar.files import sync_path, write_synced
from autopar.runtime.checkpoint.storage_layout import opened_inside
from autopar.values import parse

MANIFEST, LATEST, BESIDE = "checkpoint.json", "latest", ".saving-"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})(-\d+)?", re.ASCII)
_BEGIN = re.compile(rb'\{"format": \d+, "order": (\d+)(?:, "run": "(\w*)")?')  # the beginning of a manifest
_END = re.compile(rb', "sum": (\d+)\}$')  # the CRC of everything before
_LOCK = ".lock"
_busy: set[Path] = set()  # folders that this process is saving into: file locks do not exclude the same process


class SavedStep(NamedTuple):
    """A complete checkpoint in the folder of a run. order: its number among those saved there. run: the run that saved
    it."""

    order: int
    name: str
    run: str


@dataclass
class MemoryRun:
    """The memory checkpoints of a run, as this rank knows them. token: names their folder on each node. complete: the
    newest complete generation, or "". order: the number of the last one begun. attempt: this start of the run; a
    generation that an earlier start has left half written has another name."""

    token: str
    complete: str = ""
    order: int = 0
    attempt: str = ""

    def next(self) -> str:
        """The name of the next generation."""
        self.order += 1
        return f"{self.order:08d}-{self.attempt}"


@dataclass
class RunLineage:
    """One run, from its first checkpoint on. ``name``: stored in each checkpoint, and adopted by a model that loads
    one. began: when the model was created, in seconds. seen: by folder, the newest checkpoint when this model last
    saved or loaded there. shared: replicas save this run, one at a time."""

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    began: float = field(default_factory=time.time)
    seen: dict[Path, SavedStep | None] = field(default_factory=dict)
    shared: bool = False
    memory: dict[Path, MemoryRun] = field(default_factory=dict)  # by folder


class CheckpointDir:
    """One save into the folder of a run, on rank 0: `begin`, then `publish` or `discard`, and `close`."""

    def __init__(self, folder: Path, line: RunLineage) -> None:
        self.folder, self._line, self._name = folder.resolve(), line, ""
        self._held: IO[str] | None = None

    def begin(self, step: int) -> Path:
        """Create the empty folder to write into and remove what interrupted saves have left. Raises ValueError if
        another process is saving into the same folder, or another run has done so since this one began."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        self._check_alone()
        for left in self.folder.iterdir():
            if left.name.startswith(BESIDE) or left.name == f"{LATEST}.next":
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        names = (f"step-{step:08d}" + (f"-{n}" if n > 1 else "") for n in itertools.count(1))
        self._name = next(name for name in names if not os.path.lexists(self.folder / name))
        self.draft.mkdir()
        return self.draft

    @property
    def draft(self) -> Path:
        return self.folder / f"{BESIDE}{self._name}"

    @property
    def target(self) -> Path:
        return self.folder / self._name

    def publish(self, manifest: Mapping[str, Any], keep: int | None) -> None:
        """Make the draft the latest checkpoint; remove older ones of this run beyond ``keep``, or of the same step."""
        name, newest, line = self._name, newest_in(self.folder), self._line
        made = SavedStep(newest.order + 1 if newest is not None else 1, name, line.name)
        text = json.dumps({"format": FORMAT, "order": made.order, "run": made.run, **manifest})
        write_synced(self.draft / MANIFEST, with_sum(text))
        sync_path(self.draft)
        line.seen[self.folder] = made
        os.rename(self.draft, self.target)
        sync_path(self.folder)
        write_synced(self.folder / f"{LATEST}.next", f"{name}\n")
        os.replace(self.folder / f"{LATEST}.next", self.folder / LATEST)
        self._name = ""  # nothing to discard any more
        sync_path(self.folder)
        with contextlib.suppress(OSError):  # the next save removes the rest
            self._remove_old(name, keep)

    def _remove_old(self, last: str, keep: int | None) -> None:
        found = [known.name for known in checkpoints_in(self.folder) if known.run == self._line.name]
        again = [name for name in found if _step_in(name) == _step_in(last) and name != last]
        rest = [name for name in found if name not in again]
        for name in again + (rest[:-keep] if keep else []):
            going = self.folder / f"{BESIDE}{name}"  # a half-removed one must not look complete
            os.rename(self.folder / name, going)
            shutil.rmtree(going)

    def discard(self) -> None:
        """Remove what was written, and the checkpoint unless it is the latest already."""
        if self._name:
            with contextlib.suppress(OSError):
                os.rename(self.target, self.draft)
            shutil.rmtree(self.draft, ignore_errors=True)

    def _check_alone(self) -> None:
        """Refuse two runs at a time: each would resume from the other's checkpoints. One after the other is fine."""
        newest, line = newest_in(self.folder), self._line
        known = line.seen.get(self.folder)
        if newest is None or newest == known or (line.shared and newest.run == line.name):
            return
        if known is None:
            since, others = "began", (self.folder / newest.name / MANIFEST).stat().st_mtime > line.began
        else:
            since, others = f"saved or loaded {known.name}", newest.order >= known.order
        if others:
            raise ValueError(
                f"save: another run has saved {newest.name} into {self.folder} since this one {since}; give every job, "
                "and every model of a job, a folder of its own"
            )

    def _take_lock(self) -> None:
        path = self.folder / _LOCK
        if self.folder in _busy:
            raise ValueError(f"save: this process is saving into {self.folder} already; wait for it, or use another")
        self._held = held = path.open("a+")
        try:
            fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            held.close()
            self._held = None
            raise ValueError(
                f"save: another process is saving into {self.folder}; give every job a folder of its own"
            ) from None
        except OSError:
            pass  # a file system without locks
        _busy.add(self.folder)

    def close(self) -> None:
        """Release the lock: others may save into the folder."""
        if self._held is not None:
            self._held.close()  # releases the lock
            self._held = None
            _busy.discard(self.folder)


# --- reading ------------------------------------------------------------------------------------------------


def newest_in(folder: Path) -> SavedStep | None:
    """The last complete checkpoint, or None."""
    return max(checkpoints_in(folder), default=None)


def checkpoints_in(folder: Path) -> list[SavedStep]:
    """The complete checkpoints in a folder, oldest first."""
    found = []
    for path in folder.iterdir():
        if _NAME.fullmatch(path.name) and _is_complete(path):
            with contextlib.suppress(OSError), opened_inside(path, MANIFEST) as manifest:  # a manifest may be large
                if said := _BEGIN.match(manifest.read(200)):
                    found.append(SavedStep(int(said[1]), path.name, (said[2] or b"").decode()))
    return sorted(found)


def _is_complete(checkpoint: Path) -> bool:
    """Whether a folder has a manifest; neither may be a symbolic link."""
    return (
        not checkpoint.is_symlink() and (checkpoint / MANIFEST).is_file() and not (checkpoint / MANIFEST).is_symlink()
    )


def holds_checkpoints(folder: Path) -> bool:
    """Whether a path is a checkpoint, or a folder with some, also damaged ones; or anything else but a folder."""
    if not folder.is_dir():
        return os.path.lexists(folder)
    return (folder / MANIFEST).exists() or any(_NAME.fullmatch(p.name) and _is_complete(p) for p in folder.iterdir())


def checkpoint_at(folder: Path) -> tuple[Path, str]:
    """(the folder if it is a checkpoint, else its latest one; a warning or ""). Raises ValueError if there is none."""
    if (folder / MANIFEST).is_file():
        return folder, ""
    if not folder.is_dir():
        raise ValueError(f"load: needs a folder that autopar.save has written, found no folder {folder}")
    said = ""
    with contextlib.suppress(OSError, UnicodeDecodeError), opened_inside(folder, LATEST) as latest:
        said = latest.read(200).decode().strip()
    if _NAME.fullmatch(said) and _is_complete(folder / said):
        return folder / said, ""
    known = checkpoints_in(folder)
    if not known:
        half = [p.name for p in folder.iterdir() if p.name.startswith(BESIDE) or _NAME.fullmatch(p.name)]
        what = f"only the rest of an interrupted save ({half[0]})" if half else "none in it"
        raise ValueError(f"load: needs a checkpoint that autopar.save has written, found {what}: {folder}")
    name = known[-1].name
    return folder / name, f"{folder / LATEST} names no checkpoint ({said!r}), the last complete one is {name}"


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises ValueError if it is damaged, or of a newer format."""
    try:
        with opened_inside(checkpoint, MANIFEST) as file:
            written = file.read()
        found = parse(written.decode())
    except (OSError, ValueError) as error:
        raise ValueError(f"load: {checkpoint / MANIFEST} cannot be read: {error}; load an older checkpoint") from error
    number = found.get("format") if isinstance(found, dict) else None
    if not isinstance(number, int) or number < 1:
        raise ValueError(f"load: {checkpoint / MANIFEST} is not the manifest of a checkpoint; load an older one")
    if number > FORMAT:
        raise ValueError(
            f"load: {checkpoint} has format {number}, this version of autopar reads up to {FORMAT}; install the "
            "version that saved it, or a newer one"
        )
    assert isinstance(found, dict)
    if sum_is_right(written) is False:
        raise ValueError(f"load: {checkpoint / MANIFEST} has other bytes than were saved; load an older checkpoint")
    return found


def with_sum(text: str) -> bytes:
    """The text of a JSON object with an entry more, the CRC of everything before it."""
    return f'{text[:-1]}, "sum": {zlib.crc32(text[:-1].encode())}}}'.encode()


def sum_is_right(written: bytes) -> bool | None:
    """Whether a text is as `with_sum` made it; None if it has no sum."""
    end = _END.search(written)
    return None if end is None else int(end[1]) == zlib.crc32(written[: end.start()])


def checked_text(written: bytes) -> str:
    """The text of `with_sum`. Raises ValueError if it has other bytes."""
    if not sum_is_right(written):
        raise ValueError("it has other bytes than were written")
    return written.decode()


def read_shown(path: Path) -> Any:
    """JSON that another rank has written and announced: a shared file system may show it with a delay."""
    end = time.monotonic() + 10.0
    while True:
        try:
            return parse(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _step_in(name: str) -> int:
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else -1

"""Whether a folder is this user's alone, so that what lies in it may be believed; and the key that it is signed with.

    why_unsafe(Path("/scratch/cache"))      "everybody may write to /scratch/cache (mode 0777)"; "": nothing is wrong
    user_key(folder, make=True)             32 random bytes in the file "key", which nobody else may read

Who may write into a folder above can put another one in its place, but files and keys of others are never read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from autopar.files import opened_plain, written_beside

KEY, KEY_SIZE = "key", 32  # bytes
_OTHERS_WRITE, _OTHERS_READ = stat.S_IWGRP | stat.S_IWOTH, stat.S_IRWXG | stat.S_IRWXO
_MOST_LINKS = 40


def why_unsafe(folder: Path) -> str:
    """What lets others write into a folder, in words; "" where nothing does. Of one that is not there yet, the folders
    and links that lead to it decide."""
    here, left, links = Path("/"), [*reversed(folder.absolute().parts[1:])], 0
    while left:
        part = left.pop()
        step = here.parent if part == ".." else here / part
        try:
            found = step.lstat()
        except OSError:  # what is not there, or cannot be looked at, is neither read nor written
            return ""
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if found.st_uid not in (os.getuid(), 0) or links > _MOST_LINKS:
                return f"the link {step} belongs to another user, or leads nowhere"
            target = Path(os.readlink(step))
            here = Path("/") if target.is_absolute() else here
            left += [part for part in reversed(target.parts) if part != "/"]
            continue
        if not left:
            return _why_not_own(step, found)
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            return f"everybody may write to {step} ({_mode(found)})"
        here = step
    return ""


def why_not_own(path: Path) -> str:
    """What is wrong with a folder itself; "" for one that is not there."""
    try:
        return _why_not_own(path, path.lstat())
    except OSError:
        return ""


def keep_others_out(folder: Path) -> None:
    """A folder that autopar makes is its user's alone, whatever a umask made of it before."""
    with contextlib.suppress(OSError):
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and found.st_mode & _OTHERS_WRITE:
            os.chmod(folder, 0o700)


def _why_not_own(path: Path, found: os.stat_result) -> str:
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is no folder"
    if found.st_uid != os.getuid():
        return f"{path} belongs to another user"
    return f"others may write to {path} ({_mode(found)})" if found.st_mode & _OTHERS_WRITE else ""


def _mode(found: os.stat_result) -> str:
    return f"mode {stat.S_IMODE(found.st_mode):04o}"


# --- the key --------------------------------------------------------------------------------------------------


def user_key(folder: Path, make: bool = False) -> bytes | None:
    """None where there is none that only this user may read. ``make``: one is made where there is no file; of several
    processes that do so at once all get the same. Raises OSError where that fails."""
    if make and not os.path.lexists(folder / KEY):
        _make_key(folder)
    return _read_key(folder)[0]


def why_no_key(folder: Path) -> str:
    """What is wrong with the key of a folder, in words; "" where there is none."""
    return _read_key(folder)[1]


def _read_key(folder: Path) -> tuple[bytes | None, str]:
    path = folder / KEY
    try:
        with opened_plain(path) as file:
            facts = os.fstat(file.fileno())
            if facts.st_uid != os.getuid():
                return None, f"{path} belongs to another user"
            if facts.st_mode & _OTHERS_READ:
                return None, f"others may read or write {path} ({_mode(facts)})"
            found = file.read(KEY_SIZE + 1)
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{path} cannot be read ({error.strerror or error})"
    return (found, "") if len(found) == KEY_SIZE else (None, f"{path} is no key")


def _make_key(folder: Path) -> None:
    """Whole or not at all; the first one stays."""
    with written_beside(folder, secrets.token_bytes(KEY_SIZE), "unfinished-") as name:
        try:
            os.link(name, folder / KEY)
        except FileExistsError:
            pass
        except OSError:  # a file system without links: the last one stays
            os.rename(name, folder / KEY)

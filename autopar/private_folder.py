"""Whether only this user may write to a folder, so that its files can be trusted; and the key that signs them.

    why_unsafe(Path("/scratch/cache"))      "everybody may write to /scratch/cache (mode 0777)", or "" if it is safe
    user_key(folder, make=True)             32 random bytes in the file "key", which nobody else may read

Others who may write to a parent folder can replace the folder, but files and keys that others own are never read.
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
    """Why others may write to a folder; "" if they may not. For a folder that does not exist yet, its parent folders
    and links are checked."""
    here, left, links = Path("/"), [*reversed(folder.absolute().parts[1:])], 0
    while left:
        part = left.pop()
        step = here.parent if part == ".." else here / part
        try:
            found = step.lstat()
        except OSError:  # a folder that does not exist, or is not accessible, is not used
            return ""
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if found.st_uid not in (os.getuid(), 0) or links > _MOST_LINKS:
                return f"the link {step} belongs to another user, or is part of a cycle"
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
    """What is wrong with a folder itself; "" if it does not exist."""
    try:
        return _why_not_own(path, path.lstat())
    except OSError:
        return ""


def keep_others_out(folder: Path) -> None:
    """Remove write access of others from a folder that autopar has created, whatever the umask was then."""
    with contextlib.suppress(OSError):
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and found.st_mode & _OTHERS_WRITE:
            os.chmod(folder, 0o700)


def _why_not_own(path: Path, found: os.stat_result) -> str:
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is not a folder"
    if found.st_uid != os.getuid():
        return f"{path} belongs to another user"
    return f"others may write to {path} ({_mode(found)})" if found.st_mode & _OTHERS_WRITE else ""


def _mode(found: os.stat_result) -> str:
    return f"mode {stat.S_IMODE(found.st_mode):04o}"


# --- the key --------------------------------------------------------------------------------------------------


def user_key(folder: Path, make: bool = False) -> bytes | None:
    """The signing key; None if there is none that only this user can read. ``make``: create one if there is no file;
    concurrent processes get the same key. Raises OSError if that fails."""
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
    return (found, "") if len(found) == KEY_SIZE else (None, f"{path} is not a key")


def _make_key(folder: Path) -> None:
    """Create the key file atomically; the first one wins."""
    with written_beside(folder, secrets.token_bytes(KEY_SIZE), "unfinished-") as name:
        try:
            os.link(name, folder / KEY)
        except FileExistsError:
            pass
        except OSError:  # the file system has no hard links: the last one wins
            os.rename(name, folder / KEY)

"""The folder of the cache: complete files or none, while others write, die, tamper or clear at the same time."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from autopar.cache import disk_cache as module
from autopar.cache import entry_file
from autopar.cache.disk_cache import DEFAULT_SIZE, DiskCache, entry_folder
from autopar.cache.entry_file import packed_entry, read_entry, unpacked_entry
from autopar.private_folder import user_key, why_unsafe

KEY, OTHER = "ab" * 20, "cd" * 20
SECRET = b"s" * 32
SECTIONS = {"main": b"x" * 1000, "graph 0": b"", "graph 1": bytes(range(256))}
ABOUT = {"model": "Net", "mesh": "dp=2", "kind": "train"}
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def folder(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path)


def file_of(folder: DiskCache, key: str = KEY) -> Path:
    return folder.path / "steps-2" / f"{key}.step"


def sections_of(entry: Any) -> dict[str, bytes]:
    return {name: entry.sections[name] for name in SECTIONS}


def test_what_is_written_is_read(folder: DiskCache) -> None:
    assert folder.read(KEY) is None
    assert folder.write(KEY, ABOUT, SECTIONS)
    entry = folder.read(KEY)
    assert entry is not None and entry.about == ABOUT and sections_of(entry) == SECTIONS
    assert "graph 2" not in entry.sections
    assert folder.read(OTHER) is None
    (listed,) = folder.entries()
    assert listed.key == KEY and listed.about == ABOUT and listed.hits == 1


def test_no_torn_or_changed_file_is_read(folder: DiskCache) -> None:
    folder.write(KEY, ABOUT, SECTIONS)
    path, data = file_of(folder), file_of(folder).read_bytes()
    for length in (0, 1, 15, 30, 57, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        assert folder.read(KEY) is None, length
    generator = random.Random(0)
    for _ in range(200):
        place, bit = generator.randrange(len(data)), 1 << generator.randrange(8)
        path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
        assert folder.read(KEY) is None, (place, bit)
    path.write_bytes(data + b"\0")
    assert folder.read(KEY) is None
    path.write_bytes(data.replace(b"autopar cache 2", b"autopar cache 1"))
    assert folder.read(KEY) is None
    path.write_bytes(data)
    assert folder.read(KEY) is not None


def test_what_nobody_signed_is_not_read_and_replaced(folder: DiskCache) -> None:
    """Files from before there were signatures, of another key, of another name; a key that is lost."""
    folder.write(KEY, ABOUT, SECTIONS)
    path, good = file_of(folder), file_of(folder).read_bytes()
    digest, _, rest = good.partition(b"\n")
    old = b"autopar cache 1 " + hashlib.blake2b(rest, digest_size=20).hexdigest().encode() + b"\n" + rest
    foreign = packed_entry(SECRET, KEY, ABOUT, SECTIONS)
    other = digest[:-1] + (b"1" if digest.endswith(b"0") else b"0") + b"\n" + rest
    for bad in (old, foreign, other, digest.upper() + b"\n" + rest, b"autopar cache 2 \n" + rest):
        path.write_bytes(bad)
        assert folder.read(KEY) is None and folder.entries() == []
        assert folder.write(KEY, ABOUT, SECTIONS) and folder.read(KEY) is not None
    file_of(folder, OTHER).write_bytes(good)
    assert folder.read(OTHER) is None
    (path.parent / "key").unlink()
    assert folder.read(KEY) is None and folder.write(KEY, ABOUT, SECTIONS) and folder.read(KEY) is not None


def test_a_key_that_others_know_is_none(folder: DiskCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write(KEY, ABOUT, SECTIONS)
    key = file_of(folder).parent / "key"
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_bytes()) == 32
    for mode in (0o640, 0o604, 0o620, 0o602):
        key.chmod(mode)
        assert folder.read(KEY) is None and not folder.write(OTHER, ABOUT, SECTIONS)
        assert f"others may read or write {key} (mode 0{mode:o})" in folder.why_refused()
    key.chmod(0o600)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: 12345)
        assert user_key(key.parent) is None
    key.rename(tmp_path / "elsewhere")
    key.symlink_to(tmp_path / "elsewhere")
    assert folder.read(KEY) is None and "cannot be read" in folder.why_refused()
    key.unlink()
    for content in (b"", b"short", b"x" * 33):
        key.write_bytes(content)
        key.chmod(0o600)
        assert folder.read(KEY) is None and "is not a key" in folder.why_refused()


def test_folders_that_others_may_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = DiskCache(tmp_path / "a" / "cache")
    folder.write(KEY, ABOUT, SECTIONS)
    assert folder.why_refused() == ""
    for path in (folder.path, file_of(folder).parent):
        for mode in (0o770, 0o707, 0o720, 0o1777):
            path.chmod(mode)
            assert f"others may write to {path} (mode" in folder.why_refused()
        path.chmod(0o755)
        assert folder.why_refused() == ""
    (tmp_path / "a").chmod(0o777)
    assert "everybody may write to" in folder.why_refused()
    (tmp_path / "a").chmod(0o1777)
    assert folder.why_refused() == ""
    (tmp_path / "link").symlink_to("a/../a/cache")
    (tmp_path / "around").symlink_to("around")
    assert why_unsafe(tmp_path / "link") == "" and "is part of a cycle" in why_unsafe(tmp_path / "around" / "cache")
    assert why_unsafe(tmp_path / "not there" / "yet") == ""
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: 12345)
        assert "belongs to another user" in folder.why_refused()
    for given in (folder.path, tmp_path / "link"):
        folder.path.chmod(0o777)
        monkeypatch.setenv("AUTOPAR_CACHE", str(given))
        module._refuse.cache_clear()
        with pytest.warns(UserWarning, match="cache: compiled steps are neither read nor stored, since others"):
            assert entry_folder() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert entry_folder() is None  # said once
        folder.path.chmod(0o700)
        assert entry_folder() is not None


def test_files_beside_entries_are_no_links(folder: DiskCache, tmp_path: Path) -> None:
    folder.write(KEY, ABOUT, SECTIONS)
    victim, path = tmp_path / "victim", file_of(folder)
    victim.write_text("mine")
    for suffix in (".hits", ".lock", ".never"):
        path.with_suffix(suffix).unlink(missing_ok=True)
        path.with_suffix(suffix).symlink_to(victim if suffix != ".never" else tmp_path / "made")
    assert folder.read(KEY) is not None
    with folder.turn(KEY):
        folder.refuse(KEY)
    assert victim.read_text() == "mine" and not (tmp_path / "made").exists()


def _first_key(folder: DiskCache, found: Any) -> None:
    found.put(user_key(file_of(folder).parent, make=True))


def test_processes_that_make_a_key_at_once_get_one(folder: DiskCache) -> None:
    file_of(folder).parent.mkdir(mode=0o700)
    found = FORK.SimpleQueue()
    processes = [FORK.Process(target=_first_key, args=(folder, found)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(10)
    assert len({found.get() for _ in processes}) == 1
    assert [p.name for p in file_of(folder).parent.iterdir()] == ["key"]


def test_sections_that_lie_about_their_size(folder: DiskCache) -> None:
    """A small file that would unpack to gigabytes, and lengths that reach beyond the file."""
    good = packed_entry(SECRET, KEY, ABOUT, {"main": b"x" * 100})
    rest = good.partition(b"\n")[2]

    def sealed(text: bytes) -> bytes:
        return b"autopar cache 2 " + entry_file._signature(SECRET, KEY, text) + b"\n" + text

    for old, new in (
        (b", 100]", b", 5]"),
        (b", 100]", b", 99999]"),
        (b'["main", ', b'["main", 9'),
        (b", 100]", b', "a"]'),
    ):
        entry = unpacked_entry(SECRET, KEY, sealed(rest.replace(old, new, 1)))
        if entry is not None:
            with pytest.raises(KeyError):
                entry.sections["main"]
    for text in (b"[" * 100000, b"{}\n", b'{"about": {}, "sections": [["a", 0, 2000000000], ["b", 0, 2000000000]]}\n'):
        assert unpacked_entry(SECRET, KEY, sealed(text)) is None


def test_files_of_others_and_links_are_none(folder: DiskCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder.write(KEY, ABOUT, SECTIONS)
    path, secret = file_of(folder), user_key(file_of(folder).parent)
    assert secret is not None
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert read_entry(secret, path) is None
    path.unlink()
    os.mkfifo(path)
    assert read_entry(secret, path) is None
    path.unlink()
    path.mkdir()
    assert read_entry(secret, path) is None and not folder.write(KEY, ABOUT, SECTIONS)
    path.rmdir()
    (tmp_path / "elsewhere").rename(path)
    assert read_entry(secret, path) is not None
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert read_entry(secret, path) is None


def test_the_least_recently_used_go(folder: DiskCache) -> None:
    size = len(packed_entry(SECRET, KEY, ABOUT, SECTIONS))
    small = DiskCache(folder.path, 3 * size + 10)
    keys = [f"{i:040x}" for i in range(4)]
    for i, key in enumerate(keys[:3]):
        small.write(key, ABOUT, SECTIONS)
        os.utime(file_of(small, key), (i + 1, i + 1))
    assert small.read(keys[0]) is not None  # the youngest now
    small.write(keys[3], ABOUT, SECTIONS)
    assert {entry.key for entry in small.entries()} == {keys[0], keys[2], keys[3]}
    assert not DiskCache(folder.path, size - 1).write(OTHER, ABOUT, SECTIONS)


def test_clear_takes_what_is_ours_alone(folder: DiskCache, tmp_path: Path) -> None:
    folder.write(KEY, ABOUT, SECTIONS)
    folder.refuse(OTHER)
    (tmp_path / "steps-2" / "notes.txt").write_text("mine")
    (tmp_path / "other").write_text("mine")
    assert folder.clear()[0] == 1
    assert folder.entries() == [] and not folder.is_refused(OTHER)
    assert {p.name for p in tmp_path.rglob("*")} == {"steps-2", "key", "notes.txt", "other"}


def test_no_room_and_no_right_are_no_errors(folder: DiskCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert not folder.write(KEY, ABOUT, SECTIONS)
    assert [p.name for p in tmp_path.rglob("*")] == ["steps-2"]
    (tmp_path / "file").write_text("")
    blocked = DiskCache(tmp_path / "file")  # no folder can be made there
    assert not blocked.write(KEY, ABOUT, SECTIONS) and blocked.read(KEY) is None and blocked.entries() == []
    with blocked.turn(KEY) as first:
        assert first
    blocked.refuse(KEY)
    assert not blocked.is_refused(KEY) and blocked.clear() == (0, 0)


# --- several processes ------------------------------------------------------------------------------------


def _take_turn(folder: DiskCache, made: Any, seconds: float, store: bool) -> None:
    with folder.turn(KEY):
        if folder.read(KEY) is not None:
            return
        with made.get_lock():
            made.value += 1
        time.sleep(seconds)
        if store:
            folder.write(KEY, ABOUT, SECTIONS)


def _start(folder: DiskCache, count: int, seconds: float, store: bool = True) -> tuple[list[Any], Any]:
    made = FORK.Value("i", 0)
    started = [FORK.Process(target=_take_turn, args=(folder, made, seconds, store)) for _ in range(count)]
    for process in started:
        process.start()
    return started, made


@pytest.mark.parametrize("before", [b"", b"autopar cache 1 of another key"])
def test_eight_at_once_make_it_once(folder: DiskCache, before: bytes) -> None:
    if before:
        file_of(folder).parent.mkdir(mode=0o700)
        file_of(folder).write_bytes(before)
    processes, made = _start(folder, 8, 0.3)
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    assert made.value == 1 and folder.read(KEY) is not None


def test_who_is_killed_keeps_nobody_waiting(folder: DiskCache) -> None:
    (first,), _ = _start(folder, 1, 60.0)
    deadline = time.monotonic() + 10
    while not file_of(folder).with_suffix(".lock").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    others, made = _start(folder, 3, 0.1)
    time.sleep(0.3)
    assert made.value == 0  # they wait
    os.kill(first.pid, signal.SIGKILL)
    start = time.monotonic()
    for process in others:
        process.join(20)
        assert process.exitcode == 0
    assert time.monotonic() - start < 5 and made.value >= 1 and folder.read(KEY) is not None


def test_what_cannot_be_stored_is_not_made_one_after_the_other(folder: DiskCache) -> None:
    """Who has waited in vain goes on together with the others."""
    start = time.monotonic()
    processes, made = _start(folder, 6, 0.5, store=False)
    for process in processes:
        process.join(20)
    assert made.value == 6 and time.monotonic() - start < 2.5


def test_patience_ends(folder: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    (holder,), _ = _start(folder, 1, 3.0)
    time.sleep(0.3)
    start = time.monotonic()
    with folder.turn(KEY) as first:
        assert not first and time.monotonic() - start < 1.5
    holder.kill()


def _write_often(folder: DiskCache, number: int) -> None:
    for i in range(40):
        folder.write(KEY, ABOUT, {"main": bytes([number]) * (1000 + 517 * i)})


def _killed_while_writing(folder: DiskCache) -> None:
    while True:
        folder.write(KEY, ABOUT, {"main": os.urandom(1 << 16)})


def test_readers_see_whole_files_whoever_writes_or_dies(folder: DiskCache) -> None:
    writers = [FORK.Process(target=_write_often, args=(folder, i)) for i in range(4)]
    killed = [FORK.Process(target=_killed_while_writing, args=(folder,)) for _ in range(2)]
    for process in (*writers, *killed):
        process.start()
    try:
        while not file_of(folder).exists():
            time.sleep(0.001)
        reads = 0
        secret = user_key(file_of(folder).parent)
        assert secret is not None
        while any(process.is_alive() for process in writers) or reads < 10:
            assert unpacked_entry(secret, KEY, file_of(folder).read_bytes()) is not None
            reads += 1
            if reads == 10:
                for process in killed:
                    process.kill()
    finally:
        for process in killed:  # they would go on for ever
            process.kill()
        for process in (*writers, *killed):
            process.join(10)
    assert folder.read(KEY) is not None


def test_what_was_never_finished_goes_later(folder: DiskCache) -> None:
    folder.write(KEY, ABOUT, SECTIONS)
    left = folder.path / "steps-2" / "unfinished-abc"
    left.write_bytes(b"half")
    folder.write(OTHER, ABOUT, SECTIONS)
    assert left.exists()  # somebody may be at it
    os.utime(left, (1, 1))
    folder.write(OTHER, ABOUT, SECTIONS)
    assert not left.exists()


def test_the_folder_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text in ("0", "off", "OFF"):
        monkeypatch.setenv("AUTOPAR_CACHE", text)
        assert entry_folder() is None
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    found = entry_folder()
    assert found is not None and found.path == tmp_path and found.size == DEFAULT_SIZE
    monkeypatch.setenv("AUTOPAR_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    found = entry_folder()
    assert found is not None and found.path == tmp_path / "x" / "autopar"
    for text, size in (("2e9", 2 * 10**9), ("500M", 500 << 20), ("1.5 GiB", 3 << 29), ("17", 17)):
        monkeypatch.setenv("AUTOPAR_CACHE_SIZE", text)
        found = entry_folder()
        assert found is not None and found.size == size
    monkeypatch.setenv("AUTOPAR_CACHE_SIZE", "much")
    with pytest.raises(ValueError, match="AUTOPAR_CACHE_SIZE: expected bytes"):
        entry_folder()

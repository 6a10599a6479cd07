"""`python -m autopar cache`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from autopar.cache.disk_cache import DiskCache
from autopar.cli.main import main


def test_lists_and_clears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"0 entries, 0.0 MiB of at most 2048 MiB (AUTOPAR_CACHE_SIZE), in {tmp_path}\n"
    folder, made = DiskCache(tmp_path), time.time() - 7300
    for key, model, body in (("ab" * 20, "Net[bold]", 2000), ("cd" * 20, "Llama", 4000)):
        folder.write(
            key, {"model": model, "mesh": "dp=2", "kind": "train", "created": made}, {"main": os.urandom(body)}
        )
    folder.write("ef" * 20, {"model": 3, "created": "x"}, {})  # of somebody who writes other facts
    folder.read("ab" * 20)
    assert main(["cache"]) == 0
    out = capsys.readouterr().out
    (row,) = (line.split() for line in out.splitlines() if "Net[bold]" in line)
    assert row == ["Net[bold]", "dp=2", "train", "2", "2", "h", "0", "s", "1"]
    assert "3 entries" in out and "Llama" in out
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out.startswith("autopar: removed 3 entries, 0.0 MiB")
    assert folder.entries() == []
    monkeypatch.setenv("AUTOPAR_CACHE", "off")
    assert main(["cache"]) == 0 and "the cache is off" in capsys.readouterr().out
    monkeypatch.setenv("AUTOPAR_CACHE", "")
    monkeypatch.setenv("AUTOPAR_CACHE_SIZE", "big")
    assert main(["cache"]) == 2

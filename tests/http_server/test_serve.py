"""`autopar serve` as processes: it listens, ends all ranks by a signal, and says which rank has died."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

import httpx

from tests.http_server.fake_engine import TEXT, client_of
from tests.http_server.fake_ranks import make_folder


@contextmanager
def command(folder: Path, mesh: str, *before: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and the address that it tells."""
    make_folder(folder)
    words = [sys.executable, *before, "-m", "tests.http_server.fake_ranks", str(folder), mesh]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next((line for line in process.stderr if "serving" in line), "")
        found = re.search(rf"autopar: serving {folder.name} at (http://\S+)/v1", line)
        assert found, line
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def alive(folder: Path) -> list[str]:
    """The ranks that still run."""
    return [file.name for file in folder.glob("pid*") if Path(f"/proc/{file.read_text()}").exists()]


@pytest.mark.parametrize(("mesh", "number"), [("tp=1", signal.SIGINT), ("tp=2", signal.SIGTERM)])
def test_a_signal_ends_all_ranks(tmp_path: Path, mesh: str, number: int) -> None:
    with command(tmp_path, mesh) as (process, address):
        found = client_of(address).chat.completions.create(
            model=tmp_path.name, messages=[{"role": "user", "content": "Hi"}], seed=5
        )
        assert found.choices[0].message.content == TEXT  # generation_config.json asks for temperature 0
        stream = client_of(address).completions.create(model=tmp_path.name, prompt="a", max_tokens=190, stream=True)
        next(stream)
        process.send_signal(number)
        assert process.wait(30) == 0
        assert not alive(tmp_path)


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    with command(tmp_path, "tp=2") as (process, address):
        os.kill(int((tmp_path / "pid1").read_text()), signal.SIGKILL)
        found = httpx.get(f"{address}/health", timeout=20)
        end = time.monotonic() + 20
        while found.status_code == 200 and time.monotonic() < end:
            time.sleep(0.1)
            found = httpx.get(f"{address}/health", timeout=20)
        assert found.status_code == 503 and "rank 1" in found.json()["error"]["message"]
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(30) == 1 and "rank 1 died" in said and "Traceback" not in said
        assert not alive(tmp_path)

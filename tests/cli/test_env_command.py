"""What `autopar env` says, and what it keeps to itself."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from autopar.capture.reads.code_owners import OURS
from autopar.cli.environment import _OWN, environment_lines
from autopar.cli.main import main


def test_versions_devices_and_what_is_supported_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush")
    monkeypatch.setenv("AUTOPAR_TIMEOUT", "7")
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    said = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert said["torch"].startswith(torch.__version__) and said["AUTOPAR_TIMEOUT"] == "7" and "hush" not in out
    assert {"autopar", "python", "devices", "communication", "backend=eager", "backend=inductor"} <= said.keys()
    assert said["backend=cudagraphs"] == "no: needs a GPU" and "gloo" in said["communication"]


def test_a_cache_that_cannot_be_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_SIZE", "many")
    monkeypatch.setenv("AUTOPAR_CACHE", "/nowhere")
    assert any(line.startswith("cache ") and "many" in line for line in environment_lines())


def test_a_cache_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    assert not any("cannot be written" in line for line in environment_lines())
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)  # root may write anywhere
    assert any(line.endswith("cache: cannot be written, so nothing is kept") for line in environment_lines())


def test_a_variable_that_nobody_reads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_TIMEOUTS", "7")
    assert any(line.endswith("7 (autopar reads no such variable; did you mean 'AUTOPAR_TIMEOUT'?)")
               for line in environment_lines())  # fmt: skip
    read = {
        name
        for file in Path(OURS).rglob("*.py")
        for name in re.findall(r"AUTOPAR_[A-Z_]+[A-Z]", file.read_text(encoding="utf-8"))
    }
    assert read == {*_OWN}

"""`autopar serve`: mistakes are reported before anything is loaded, and arguments are handed over."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from autopar.cli import serve_command
from autopar.cli.main import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


BAD = [
    ("", "the following arguments are required: FOLDER"),
    ("/nowhere", "argument FOLDER: no config.json in a folder '/nowhere'; give the folder of a transformers model"),
    ("F --mesh tq=2", "unknown axis 'tq'"),
    ("F --port 70000", "argument --port: expected a number from 0 to 65535, 0 for a free one, found '70000'"),
    ("F --cache much", "argument --cache: expected a number of bytes, such as 80e9, 80GB or 75GiB, found 'much'"),
    ("F --max-length 0", "argument --max-length: expected a positive whole number, found '0'"),
    ("F --dtype int3", "--dtype: expected 'bfloat16'"),
    ("F --device tpu", "argument --device: invalid choice: 'tpu'"),
    ("F --max-lenght 5", "unrecognized arguments: --max-lenght 5; did you mean '--max-length'?"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[line for line, _ in BAD])
def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *(str(folder) if word == "F" else word for word in line.split())])
    said = capsys.readouterr().err
    assert caught.value.code == 2 and message in said and said.count("\n") == 1


def test_mistakes_are_reported_before_torch_is_loaded(folder: Path) -> None:
    lines = [["serve", *(str(folder) if word == "F" else word for word in line.split())] for line, _ in BAD]
    code = f"""
import contextlib, sys
from autopar.cli.main import main
for words in {lines!r}:
    with contextlib.suppress(SystemExit):
        main(words)
assert not {{"torch", "numpy", "transformers", "fastapi", "openai"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-500:]


def test_a_missing_extra(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llguidance" else there("sys"))
    assert main(["serve", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said == "autopar: serve: needs the extra autopar[serve], found no llguidance; pip install 'autopar[serve]'\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--attention dp=2", "needs both --attention and --experts, or neither"),
        ("--apart mlp", "--apart is of ranks of experts; give --attention and --experts, too"),
    ],
)
def test_roles_come_together(folder: Path, capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    assert main(["serve", str(folder), *line.split()]) == 2
    assert message in capsys.readouterr().err


def test_arguments_are_handed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    from autopar.integrations.http.serve import Settings

    given: list[Any] = []
    module = ModuleType("autopar.integrations.http.serve")
    vars(module).update(Settings=Settings, serve_folder=lambda settings: given.append(settings) or 0)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert main(["serve", str(folder), "--mesh", "tp=2", "--cache", "8GB", "--port", "0", "--dtype", "bf16"]) == 0
    expected = (folder, "tp=2", "127.0.0.1", 0, None, 4096, 8 * 10**9, 64, 1024, "bfloat16", None)
    assert given == [Settings(*expected)]


def test_a_port_that_is_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(folder), "--mesh", "tp=2", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"autopar: serve: cannot listen at 127.0.0.1 port {port}: ") and "--port" in said


def test_what_a_folder_sets(folder: Path) -> None:
    pytest.importorskip("fastapi")
    from autopar.integrations.http.serve import sampling_defaults

    assert sampling_defaults(folder) == {}
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [5, 6], "temperature": 0.6, "top_p": 0.9, "do_sample": true, "max_length": 7}'
    )
    assert sampling_defaults(folder) == {"temperature": 0.6, "top_p": 0.9}


def test_what_is_needed_is_what_the_extra_installs() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    extra = {line.partition(">=")[0] for line in project["optional-dependencies"]["serve"]}
    assert extra - {"autopar[hf]"} == {*serve_command.NEEDED.values()} - {"transformers"}
    assert "autopar[serve]" in project["optional-dependencies"]["dev"]

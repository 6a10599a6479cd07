"""docs/serving.md: its requests work, and it names all fields and metrics."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

import httpx

from autopar.integrations.http.fields import CHAT, COMPLETIONS
from tests.http_server.fake_engine import FakeEngine, serving

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
AT, NAME = "http://127.0.0.1:8000", "Llama-3-8B"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_its_requests_work(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeEngine(vocabulary=20_000), name=NAME) as address:
        (block,) = [block for block in blocks("python") if "openai" in block]
        exec(compile(block.replace(AT, address), "docs/serving.md", "exec"), {})
        assert "completion_tokens" in capsys.readouterr().out
        (line,) = [block for block in blocks("sh") if block.startswith("curl")]
        if shutil.which("curl"):
            done = subprocess.run(line.replace(AT, address), shell=True, capture_output=True, text=True, timeout=60)
            assert '"completion_tokens":40' in done.stdout, done
        numbers = httpx.get(f"{address}/metrics").text
    named = {*re.findall(r"autopar_\w+", PAGE)}
    assert {*re.findall(r"^# TYPE (autopar_\w+)", numbers, re.MULTILINE)} - {"autopar_errors_created"} == named


def test_its_python_runs() -> None:
    """In a process of its own: it makes a mesh."""
    code = "\n".join(block for block in blocks("python") if "openai" not in block)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.rstrip().endswith(("length", "stop")), done.stdout + done.stderr


def test_it_names_every_field() -> None:
    fields = {*COMPLETIONS, *CHAT} - {"prompt", "messages"}
    assert not {name for name in fields if f"`{name}`" not in PAGE}

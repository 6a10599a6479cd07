"""Ranks from `python -c`, from stdin (as in a REPL or a notebook: no file to import), and from a script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BODY = """
import atexit
import gc
import sys

import autopar

atexit.register(gc.freeze)  # a last look for garbage would take a second

class Found:
    def __init__(self, value):
        self.value = value

shift = 5

def body(n):
    part, _ = autopar.dp_rank_and_size(autopar.init_mesh("cpu", dp=2))
    return Found(part + shift + n)

if "-c" in sys.argv:
    sys.modules["cloudpickle"] = None
    try:
        autopar.launch(body, 2, [10], device="cpu")
    except ValueError as error:
        print(error)
    del sys.modules["cloudpickle"]
found = autopar.launch(body, 2, [10], device="cpu")
print([x.value for x in found], all(isinstance(x, Found) for x in found))
"""


def python(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    call = [sys.executable, *arguments]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run(call, input=stdin, env=path, capture_output=True, text=True, timeout=200)


def test_functions_go_by_value_where_there_is_no_file() -> None:
    """With cloudpickle; the first of both processes is also told that it needs it."""
    for found in (python("-c", BODY), python("-", stdin=BODY)):
        *told, shown = found.stdout.splitlines()
        assert shown == "[15, 16] True", found.stderr
        assert bool(told) == ("-c" in found.args)
        words = "a function of python -c is sent to ranks by value, which needs cloudpickle; pip install cloudpickle"
        assert all(words in line for line in told), told


CALL = 'print(autopar.launch(body, 1, device="cpu"))\n'


@pytest.mark.parametrize("end", [CALL, f'if __name__ == "__main__":\n    {CALL}'])
def test_a_script_needs_its_guard(tmp_path: Path, end: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("import autopar\ndef body():\n    return 1\n" + end)
    found = python(str(script))
    if end == CALL:
        words = "launch: each rank imports train.py, and its line 4 would launch ranks there again; put that line under"
        assert found.returncode and words in found.stderr
    else:
        assert found.stdout == "[1]\n", found.stderr

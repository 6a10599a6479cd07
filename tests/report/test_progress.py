"""What is said while a compilation takes long, where no terminal is; and how much it is."""

from __future__ import annotations

import re
import threading
import time

import pytest

from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.report.progress import Progress
from tests.support.plain_models import Net, build, numbers


def test_a_line_from_time_to_time_and_where_the_time_went(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("compiling Net", every=0.05).begin()
    time.sleep(0.12)  # a phase that shows nothing
    compile_model(build(Net), numbers(), Mesh.of(dp=2), observers=[progress])
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("autopar: compiling Net: 0 s, after the start")
    last = re.fullmatch(r"autopar: compiling Net took \d+ s: (.*), all else \d+\.\d s", lines[-1])
    assert last and len(last[1].split(", ")) == 5 and "capture" in last[1]
    assert 2 <= len(lines) - 1 <= 2 + (time.perf_counter() - progress.start) / 0.05
    time.sleep(0.12)
    assert not capsys.readouterr().err


def test_a_short_one_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    progress = Progress("compiling Net").begin()
    compile_model(build(Net), numbers(), Mesh.of(dp=2), observers=[progress])
    progress.close()
    time.sleep(0.05)
    assert not capsys.readouterr().err and threading.active_count() == before

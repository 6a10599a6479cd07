"""The demo, with few steps: both runs agree, and what it promises lies in the folder."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from autopar.cli import demo
from autopar.cli.main import main
from tests.support.launched import serve


def test_both_runs_agree_and_the_files_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))  # as users have one: a rank compiles for the other
    serve()
    assert main(["demo", "--steps", "3", "--mesh", "dp=2", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for words in ("largest difference: ", "Memory of a process", "Sent by a rank, per step"):
        assert words in shown
    assert {"loss.png", "losses.csv", "graphs"} <= {f.name for f in tmp_path.iterdir()}
    assert (tmp_path / demo.REPORT).stat().st_size > 10_000
    with (tmp_path / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert all(abs(float(row["mesh"]) - float(row["one_process"])) < 1e-4 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--mesh", "dp2"], "--mesh: expected name=size pairs"),
        (["--mesh", "dp=3"], "does not divide over dp=3"),
        (["--mesh", "db=2"], "db"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["demo", *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert words in capsys.readouterr().err


def test_batches_are_the_same_each_time() -> None:
    first, second = ([b["input_ids"] for b in demo.batches(2)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert first[0].shape == (demo.BATCH, demo.LENGTH) and not torch.equal(first[0], first[1])

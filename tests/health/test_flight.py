"""The flight recorder: what ranks write when one of them has gone, and what is read from it."""

from __future__ import annotations

import gc
import json
import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.cli.main import main
from autopar.report.flight_summary import Event, Flight, conclusions, doing, read_flights
from autopar.runtime.exec.instructions import BoundAction
from autopar.runtime.fault import flight
from tests.health.test_finite import Stack
from tests.support.ranks import rank_outcomes, run_ranks


def flight_of(rank: int, what: str, ranks: tuple[int, ...] = (), kind: str = "wait", error: str = "E") -> Flight:
    events = [Event("action", "0F0", 0.0, 1.0, ()), Event(kind, what, 2.0, None if what else 3.0, ranks)]
    return Flight(rank, "node", 10.0, error, events)


@pytest.mark.parametrize(
    ("flights", "said"),
    [
        (
            [flight_of(0, "all_reduce 1", (0, 1)), flight_of(1, "0RF0", (2,))],
            ["rank 2 has written nothing: it died, was stopped, or its node has another folder; "
             "ranks 0, 1 waited for it"],
        ),
        (
            [flight_of(0, "all_reduce 1", (0, 1)), flight_of(1, "all_reduce 2", (0, 1)), flight_of(2, "x", (0, 2))],
            ["ranks 0, 1 waited for each other; rank 2 waited for them"],
        ),
        (
            [flight_of(0, "all_reduce 1", (0, 1)), flight_of(1, "all_reduce 1", (0, 1))],
            ["every rank waited in the same exchange: its messages did not arrive"],
        ),
        (
            [flight_of(0, "all_reduce 1", (0, 1)), flight_of(1, "0BW0", kind="action", error="OSError: disk")],
            ["rank 1, computes 0BW0: OSError: disk; rank 0 waited for it"],
        ),
        (
            [flight_of(0, "gather", (0, 1)), flight_of(1, "", (), error="ValueError: x")],
            ["rank 1, between steps, after : ValueError: x; rank 0 waited for it"],
        ),
    ],
)  # fmt: skip
def test_who_waited_for_whom(flights: list[Flight], said: list[str]) -> None:
    assert conclusions(flights) == said


def test_what_a_rank_did_at_the_end() -> None:
    assert doing(flight_of(0, "all_reduce 1", (0, 1, 3))) == ("waits in all_reduce 1", "8.0 s", "1, 3")


def lose_a_rank(folder: str, sizes: dict[str, int]) -> None:
    os.environ[flight.VARIABLE] = folder
    batch = {"x": torch.randn(4, 8)}
    parallel = autopar.parallelize(Stack("", -1), autopar.init_mesh("cpu", 20.0, **sizes), example_batch=batch)
    for i in range(3):
        if i == 2 and dist.get_rank() == 1:
            os._exit(7)
        parallel.train_step(**batch)


def test_survivors_write_whom_they_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = rank_outcomes(3, lose_a_rank, str(tmp_path), {"dp": 3}, timeout=60, grace=25)
    assert outcomes[0].error and outcomes[2].error
    flights, earlier, _ = read_flights(tmp_path)
    assert [one.rank for one in flights] == [0, 2] and not earlier
    for one in flights:
        assert one.waits is not None and 1 in one.waits.ranks and "rank 1" in one.error
        assert {event.kind for event in one.events} == {"action", "wait"}
        assert all(event.end is None or event.end >= event.start for event in one.events)
    assert main(["flight", str(tmp_path), "--last", "3"]) == 0
    told = capsys.readouterr().out
    assert "rank 1 has written nothing" in told and "ranks 0, 2 waited for it" in told, told


def actions_after_a_model() -> int:
    """How many actions, which hold graphs and their constants, are left when their model is gone."""
    batch = {"x": torch.randn(4, 8)}
    parallel = autopar.parallelize(Stack("", -1), autopar.init_mesh("cpu", dp=2), example_batch=batch)
    parallel.train_step(**batch)
    actions = [weakref.ref(x) for x in gc.get_objects() if isinstance(x, BoundAction)]
    assert actions
    del parallel
    gc.collect()
    return sum(action() is not None for action in actions)


def test_events_do_not_keep_a_model() -> None:
    assert run_ranks(2, actions_after_a_model) == [0, 0]


def test_a_file_of_an_earlier_failure_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, age in ((0, 0.0), (1, 9000.0)):
        told = {"rank": rank, "host": "a", "written": time.time() - age, "error": "", "events": []}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(told))
    assert main(["flight", str(tmp_path)]) == 0
    assert "left out, of an earlier failure: ranks 1" in capsys.readouterr().out


GOOD: dict[str, Any] = {"rank": 0, "host": "a", "written": 1.0, "error": "", "events": []}
EVENT: dict[str, Any] = {"kind": "wait", "what": "x", "start": 0.0, "end": None, "ranks": [1]}
BAD = {"rank": (-1, "0"), "written": ("x", 1e300, float("nan")), "host": (3,), "events": (4, [3])}
BAD_EVENTS = {"kind": (1,), "start": (None,), "end": ("x",), "ranks": ([-1], 7)}


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "null", '{"rank": 0', "\0" * 9, "[" * 100_000),
        *(json.dumps({**GOOD, name: x}) for name, values in BAD.items() for x in values),
        *(json.dumps({**GOOD, "events": [{**EVENT, name: x}]}) for name, values in BAD_EVENTS.items() for x in values),
    ],
)
def test_files_that_are_none_are_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.json").write_text(text)
    assert main(["flight", str(tmp_path)]) == 2
    assert "is no file of a rank" in capsys.readouterr().err


def test_folders_that_are_none_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.json").symlink_to("/etc/hostname")
    for folder in (tmp_path, tmp_path / "none"):
        assert main(["flight", str(folder)]) == 2
        assert "autopar: flight:" in capsys.readouterr().err


def test_where_it_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for off in ("0", "off"):
        monkeypatch.setenv("AUTOPAR_FLIGHT", off)
        assert flight.folder() is None
    monkeypatch.setenv("AUTOPAR_FLIGHT", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "../job 3")
    monkeypatch.setenv("MASTER_ADDR", "node-1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert flight.folder() == tmp_path / "autopar/flight/.._job_3-node-1-29500"


def test_a_damaged_file_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps({**GOOD, "rank": rank}))
    (tmp_path / "rank-2.json").write_text(json.dumps({**GOOD, "rank": 2})[:-9])
    assert main(["flight", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "rank-2.json is no file of a rank" in said and "When the collective failed" in said

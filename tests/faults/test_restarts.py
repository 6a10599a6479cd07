"""torchrun --max-restarts: a run that is killed at any moment resumes, with the losses of one that is not."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.campaign import free_port
from tests.faults.restarted_run import STEPS, Model, batch_of

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "faults" / "restarted_run.py"
EXACT = 1e-10
PATIENCE = 400.0  # seconds of a run with its restarts, on a machine that others use


def agent(folder: Path, seed: int, faults: int, *how: str, pause: float = 0.0) -> subprocess.Popen[str]:
    """A node's launcher. pause: seconds between steps."""
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3", "--monitor-interval", "0.2", *how]
    own = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "AUTOPAR_CACHE": str(folder / "steps"),
    }
    return subprocess.Popen(
        [*command, str(SCRIPT), str(folder), str(seed), str(faults), str(pause)],
        env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def ended(launched: subprocess.Popen[str]) -> str:
    """What a launcher printed until its end; it has succeeded."""
    try:
        printed, _ = launched.communicate(timeout=PATIENCE)
    finally:
        if launched.poll() is None:
            os.killpg(launched.pid, signal.SIGKILL)
    assert launched.returncode == 0, printed
    return printed


def noted(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "losses").read_text().splitlines()]


@functools.cache
def losses_of_one_process() -> list[float]:
    torch.manual_seed(0)
    model, losses = Model().double(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch_of(step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def check(notes: list[dict[str, Any]]) -> None:
    """Each step was made, each time with the loss of one process; bit for bit alike on as many ranks."""
    steps = [note for note in notes if note["what"] == "step"]
    assert {note["step"] for note in steps} == set(range(STEPS))
    seen: dict[tuple[int, int], str] = {}
    for note in steps:
        assert abs(float.fromhex(note["loss"]) - losses_of_one_process()[note["step"]]) < EXACT, note
        assert seen.setdefault((note["step"], note["ranks"]), note["loss"]) == note["loss"], note


def restarted(seed: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        printed = ended(agent(folder, seed, 3, "--standalone", "--nproc-per-node", "2"))
        notes = noted(folder)
        check(notes)
        assert len({note["attempt"] for note in notes}) == 4, printed


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 17))])
def test_three_faults_in_a_run(seed: int) -> None:
    """Of 17 runs with -m full: 51 faults."""
    restarted(seed)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_node_that_is_lost_and_comes_back(tmp_path: Path) -> None:
    """Two nodes of one rank; one is killed with its launcher, and the other goes on alone; then there are two again."""
    end = f"127.0.0.1:{free_port()}"
    how = ("--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", end,
           "--rdzv-conf", "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=2")  # fmt: skip
    first = agent(tmp_path, 0, 0, *how, pause=2.0)
    second = agent(tmp_path, 0, 0, *how, pause=2.0)
    wait_for_step(tmp_path, [2])
    os.killpg(second.pid, signal.SIGKILL)
    second.communicate()
    wait_for_step(tmp_path, [2, 1])
    third = agent(tmp_path, 0, 0, *how, pause=2.0)
    ended(first)
    ended(third)
    notes = noted(tmp_path)
    check(notes)
    assert ranks_in_turn(notes) == [2, 1, 2]


def wait_for_step(folder: Path, turns: list[int]) -> None:
    end = time.monotonic() + PATIENCE
    while ranks_in_turn(notes := noted_so_far(folder)) != turns:
        assert time.monotonic() < end, notes
        time.sleep(0.05)


def ranks_in_turn(notes: list[dict[str, Any]]) -> list[int]:
    """The number of ranks that steps were made on, wherever it changes."""
    return [ranks for ranks, _ in itertools.groupby(note["ranks"] for note in notes if note["what"] == "step")]


def noted_so_far(folder: Path) -> list[dict[str, Any]]:
    return noted(folder) if (folder / "losses").exists() else []

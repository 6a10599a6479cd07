"""torchrun --max-restarts: a run that is killed at any moment resumes, with the losses of one that is not."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.campaign import free_port
from tests.faults.restarted_run import SIGNALS, STEPS, Model, batch_of

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "faults" / "restarted_run.py"
EXACT = 1e-10
PATIENCE = 400.0  # seconds of a run with its restarts, on a machine that others use


def launcher(
    folder: Path, *how: str, seed: int = 0, faults: int = 0, pause: float = 0.0, where: str = "disk",
    ways: Sequence[str] = SIGNALS,
) -> tuple[list[str], dict[str, str]]:  # fmt: skip
    """The command of a node's launcher, and its environment. pause: seconds between steps. where: what the run saves
    to."""
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3", "--monitor-interval", "0.2", *how]
    environment = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "AUTOPAR_CACHE": str(folder / "steps"),
        "AUTOPAR_FLIGHT": str(folder / "flight"),
        # else a node that joins in a later round waits for an address that was published in the first (torch 2.13)
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1" if "--nnodes" in how else "0",
    }
    arguments = [str(folder), str(seed), str(faults), str(pause), where, ",".join(ways)]
    return [*command, str(SCRIPT), *arguments], environment


def agent(folder: Path, *how: str, memory: str = "memory", **run: Any) -> subprocess.Popen[str]:
    """A node's launcher. memory: the name of a folder that is this node's memory."""
    command, environment = launcher(folder, *how, **run)
    return subprocess.Popen(
        command, env={**os.environ, **environment, "AUTOPAR_MEMORY": str(folder / memory)}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
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


def lose(node: subprocess.Popen[str]) -> None:
    """A launcher and its ranks end at once."""
    ranks = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    for process in [node.pid, *map(int, ranks)]:
        os.kill(process, signal.SIGKILL)
    node.communicate()


def noted(folder: Path) -> list[dict[str, Any]]:
    notes = folder / "losses"
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


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


def restarted(seed: int, where: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        printed = ended(agent(folder, "--standalone", "--nproc-per-node", "2", seed=seed, faults=3, where=where))
        notes = noted(folder)
        check(notes)
        assert len({note["attempt"] for note in notes}) == 4, printed


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 17))])
def test_three_faults_in_a_run(seed: int) -> None:
    """Of 17 runs with -m full: 51 faults; every second run saves to memory alone."""
    restarted(seed, "memory" if seed % 2 else "disk")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_node_that_is_lost_and_comes_back(tmp_path: Path, where: str) -> None:
    """Two nodes of one rank; one is killed with its launcher, its memory is lost, and the other goes on alone; then two
    are there again."""
    port = free_port()
    how = ("--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
           "--rdzv-conf", "last_call_timeout=10,keep_alive_interval=3,keep_alive_max_attempt=3")  # fmt: skip
    node = functools.partial(agent, tmp_path, *how, pause=6.0, where=where)
    first = node()
    wait_until(lambda: listens(port), first)  # it hosts the rendezvous, and lives
    second = node(memory="memory of the second")
    wait_until(lambda: sum(note["what"] == "step" for note in noted(tmp_path)) == 2, first)  # the first is saved
    lose(second)
    wait_until(lambda: ranks_in_turn(tmp_path) == [2, 1], first)
    third = node(memory="memory of the third")
    ended(first)
    ended(third)
    check(noted(tmp_path))
    assert ranks_in_turn(tmp_path) == [2, 1, 2]
    loaded = [(note["step"] > 0, note["memory"]) for note in noted(tmp_path) if note["what"] == "loaded"]
    assert loaded == [(False, False), (True, where == "memory"), (True, where == "memory")]


def wait_until(happens: Callable[[], bool], launched: subprocess.Popen[Any], printed: Callable[[], str] = str) -> None:
    """Wait for something that happens while a process runs. printed: what it has said, if that does not happen."""
    end = time.monotonic() + PATIENCE
    while not happens():
        assert launched.poll() is None and time.monotonic() < end, printed()
        time.sleep(0.05)


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def ranks_in_turn(folder: Path) -> list[int]:
    """The number of ranks that steps were made on, wherever it changes."""
    return [ranks for ranks, _ in itertools.groupby(n["ranks"] for n in noted(folder) if n["what"] == "step")]

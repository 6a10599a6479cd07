"""Replicas as users start them: a store of `autopar replica-store`, and a torchrun of each, which starts it anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from tests.faults.test_restarts import wait_until
from tests.replicas.run import Model, whole_batch
from tests.support.emulated_nodes import Node, emulated_nodes
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 400.0  # seconds, on a machine that others use
STEPS = 150


ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "AUTOPAR_HEARTBEAT_TIMEOUT": "3"}


def started(*command: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env={**os.environ, **ENVIRONMENT, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip


def replica_store(port: int) -> list[str]:
    return [sys.executable, "-m", "autopar", "replica-store", "--port", str(port)]


def launcher(ranks: int, *arguments: object) -> list[str]:
    """The command that launches a replica."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts",
        "9", "--monitor-interval", "0.2", str(ROOT / "tests" / "replicas" / "torchrun_script.py"), *map(str, arguments),
    ]  # fmt: skip


def noted(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def losses_of_one_process() -> list[float]:
    mesh, losses = autopar.init_mesh("cpu", dp=1), []
    torch.manual_seed(0)
    model = autopar.parallelize(Model().double(), mesh, example_batch=whole_batch(0, range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        losses.append(float(model.train_step(**whole_batch(step, range(2)))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check(notes: list[dict[str, Any]]) -> None:
    """Replica 0 has made each step; all losses are those of one process, and alike on both replicas."""
    of = {i: {note["step"]: note["loss"] for note in notes if note["index"] == i} for i in range(2)}
    assert all(of[0][step] == loss for step, loss in of[1].items())
    (expected,) = run_ranks(1, losses_of_one_process)
    assert [of[0][step] for step in range(STEPS)] == pytest.approx(expected, abs=1e-10)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_replica_is_started_anew(tmp_path: Path) -> None:
    host = started(*replica_store(0))
    file = tmp_path / "losses"
    launched = []
    try:
        assert host.stdout is not None
        port = host.stdout.readline().strip().rpartition(":")[2]
        for index in range(2):
            where = {"AUTOPAR_REPLICA": str(index), "AUTOPAR_REPLICA_STORE": f"127.0.0.1:{port}"}
            launched.append(started(*launcher(2, STEPS, 0.2, file, 3), **where))
        printed = [one.communicate(timeout=PATIENCE)[0] for one in launched]
    finally:
        for one in (host, *launched):
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
    assert [one.returncode for one in launched] == [0, 0], printed
    notes = noted(file)
    check(notes)
    assert 0 < max(n["step"] for n in notes if n["members"] == [0]) < STEPS - 1, "it was away for a while"
    assert {note["attempt"] for note in notes if note["index"] == 1} == {0, 1}, printed


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("how", "seconds"), [(Node.cut, 15.0), (Node.cut, 45.0), (Node.deafen, 15.0)])
def test_a_replica_that_is_cut_off_returns(tmp_path: Path, how: Callable[[Node], None], seconds: float) -> None:
    """The other one goes on without it; when its cable is back, it is given the state: the same process, or, if that
    has given up meanwhile, the next start. Both have the same losses."""
    file, launched = tmp_path / "losses", []
    with emulated_nodes(3) as nodes:
        store = nodes[2].start(replica_store(29600), ENVIRONMENT, tmp_path / "log-store")
        for index in range(2):
            where = {"AUTOPAR_REPLICA": str(index), "AUTOPAR_REPLICA_STORE": "node-2:29600"}
            command, log = launcher(1, STEPS, 0.7, file), tmp_path / f"log-{index}"
            launched.append(nodes[index].start(command, ENVIRONMENT | where, log))

        def printed() -> str:
            return "".join(log.read_text() for log in sorted(tmp_path.glob("log-*")))

        def last_members(index: int) -> list[int]:
            return next((note["members"] for note in reversed(noted(file)) if note["index"] == index), [])

        wait_until(lambda: last_members(1) == [0, 1], launched[0], printed)
        how(nodes[1])
        wait_until(lambda: last_members(0) == [0], launched[0], printed)
        time.sleep(seconds)
        nodes[1].mend()
        wait_until(lambda: last_members(0) == [0, 1], launched[0], printed)
        assert [one.wait(PATIENCE) for one in launched] == [0, 0], printed()
        assert store.poll() is None
    check(noted(file))

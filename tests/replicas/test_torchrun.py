"""Replicas as users start them: a store of `autopar replica-store`, and a torchrun of each, which starts it anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 400.0  # seconds, on a machine that others use
STEPS = 100


def started(*command: str, **environment: str) -> subprocess.Popen[str]:
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "AUTOPAR_HEARTBEAT_TIMEOUT": "3", **environment}
    return subprocess.Popen(
        [sys.executable, "-m", *command], env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_replica_is_started_anew(tmp_path: Path) -> None:
    host = started("autopar", "replica-store", "--port", "0")
    file = tmp_path / "losses"
    launched = []
    try:
        assert host.stdout is not None
        port = host.stdout.readline().strip().rpartition(":")[2]
        for index in range(2):
            launched.append(
                started(
                    "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3",
                    "--monitor-interval", "0.2", str(ROOT / "tests" / "replicas" / "torchrun_script.py"), str(STEPS),
                    str(file), AUTOPAR_REPLICA=str(index), AUTOPAR_REPLICA_STORE=f"127.0.0.1:{port}",
                )
            )  # fmt: skip
        printed = [one.communicate(timeout=PATIENCE)[0] for one in launched]
    finally:
        for one in (host, *launched):
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
    assert [one.returncode for one in launched] == [0, 0], printed
    notes: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    of = {i: {note["step"]: note["loss"] for note in notes if note["index"] == i} for i in range(2)}
    assert of[0].keys() == set(range(STEPS))
    assert 0 < max(n["step"] for n in notes if n["members"] == [0]) < STEPS - 1, "it was away for a while"
    assert {note["attempt"] for note in notes if note["index"] == 1} == {0, 1}, printed
    assert all(of[0][step] == loss for step, loss in of[1].items())

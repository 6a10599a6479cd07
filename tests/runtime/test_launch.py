"""Ranks by launch: results, tracebacks, a dead rank; and by torchrun (tests/support/torchrun_script.py)."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.mesh.process_groups import Groups, init_mesh
from autopar.runtime.training.launch import launch, to_bytes
from tests.support.launched import serve
from tests.support.meeting import meet_for


@pytest.fixture(autouse=True, scope="module")
def _served() -> None:
    serve()


def total(x: torch.Tensor) -> tuple[int, float]:
    groups = Groups(init_mesh("cpu", dp=2))
    y = x * (groups.rank + 1)
    dist.all_reduce(y, group=groups.group("dp"))
    return groups.rank, y.item()


def fail(rank: int, how: str) -> None:
    groups = Groups(init_mesh("cpu", dp=2))
    meet_for(groups, "start")
    if groups.rank == rank:
        if how == "raise":
            raise KeyError("boom")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    meet_for(groups, "the end", timeout=4)


def test_results_in_rank_order() -> None:
    assert launch(total, 2, (torch.tensor(2.0),), timeout=30) == [(0, 6.0), (1, 6.0)]


def test_an_error_comes_back_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed: KeyError: 'boom'.*traceback of rank 1.*in fail"):
        launch(fail, 2, (1, "raise"), timeout=10)


def test_a_killed_rank_ends_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 died with exit code -9"):
        launch(fail, 2, (0, "kill"), timeout=10)
    assert time.monotonic() - start < 30


def test_results_on_a_gpu_come_back_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever holds them, and tensors that are there twice are one."""
    moved: list[torch.Tensor] = []
    to_cpu = torch.Tensor.cpu
    monkeypatch.setattr("autopar.runtime.training.launch._on_gpu", lambda x: x.numel() > 1)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: moved.append(x) or to_cpu(x))
    x, p = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(3), requires_grad=False)
    found = pickle.loads(to_bytes({"x": [x, x], "p": p, "loss": torch.tensor(1.0), "why": "text"}))
    assert [len(m) for m in moved] == [2, 3]
    assert found["x"][0] is found["x"][1] and found["x"][0].requires_grad and found["x"][0].tolist() == [1, 1]
    assert type(found["p"]) is torch.nn.Parameter and not found["p"].requires_grad and found["loss"].item() == 1


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="module-level function"):
        launch(lambda: None, 2)
    with pytest.raises(ValueError, match="at least 1"):
        launch(total, 0)


def test_under_torchrun(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    script = root / "tests" / "support" / "torchrun_script.py"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script),
        str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=root, env=_environment(root), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fine0", "fine1", "rank0.ok", "rank1.ok"]


def _environment(root: Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    return {**env, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


def alone() -> dict[str, int]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    groups = Groups(init_mesh("cpu"))
    meet_for(groups, "alone")
    return groups.mesh.sizes


def test_one_process_without_any_environment() -> None:
    assert launch(alone, 1) == [{"dp": 1}]

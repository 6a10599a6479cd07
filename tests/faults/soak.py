"""A run for hours with all that watches it on: does anything grow?

    python -m tests.faults.soak --minutes 180 --kill-every 15

Two ranks under torchrun train with both checks, save to memory and to the disk, and are restarted whenever one of them
is killed. Each rank notes every few seconds what it and the job hold. At the end: the growth of each number per hour,
by a line of least squares through the second half of what a start noted, and over all restarts.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.adapters.distributed import default_store
from autopar.runtime.checkpoint.memory_folder import memory_root

ROOT = Path(__file__).resolve().parents[2]
EVERY = 5.0  # seconds between two notes
OF_RANK, OF_JOB = ("memory_kb", "threads", "descriptors", "objects"), ("keys", "files", "shm_bytes", "shm_files")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(64, 256), nn.Dropout(0.1), nn.Linear(256, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(self.drop(torch.relu(self.up(x)))), y)


def held(folder: Path) -> dict[str, int]:
    """What this process and the job hold."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory = [*sizes(memory_root())]
    gc.collect()
    return {
        "memory_kb": int(status["VmRSS"].split()[0]) - int(status["RssShmem"].split()[0]),
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
        "keys": default_store().num_keys(),
        "files": len([*sizes(folder)]),
        "shm_files": len(memory),
        "shm_bytes": sum(memory),
    }


def sizes(folder: Path) -> Iterator[int]:
    """Bytes of each file, of which some, and their folders, may go meanwhile."""
    for base, _, names in os.walk(folder):  # passes over a folder that has gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                yield os.stat(os.path.join(base, name)).st_size


def train(folder: Path, end: float) -> None:
    """On a rank, until the time is up."""
    mesh = autopar.init_mesh("cpu", 60.0, dp="rest")
    rank, ranks = autopar.dp_rank_and_size(mesh)
    torch.manual_seed(0)

    def batch(step: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(step)
        whole = {name: torch.randn(16, n, generator=drawn) for name, n in (("x", 64), ("y", 8))}
        return {name: x.chunk(ranks)[rank] for name, x in whole.items()}

    model = autopar.parallelize(
        Model(), mesh, zero=1, example_batch=batch(0), backend="eager", check=["finite", "replay:20"]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = autopar.load(folder / "run", model, optimizer, missing_ok=True).step
    notes, last = folder / f"notes-{os.environ['RANK']}", 0.0
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    going = torch.ones(1)
    with autopar.monitor(model, to=[str(folder / "metrics.jsonl")]) as monitor:
        while going.item():
            loss = float(model.train_step(**batch(step)))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            monitor.step(loss=loss)
            autopar.save(folder / "run", model, optimizer, step=step, memory=True)
            if step % 50 == 0:
                autopar.save(folder / "run", model, optimizer, step=step, asynchronous=True, keep=2)
            if time.time() - last > EVERY:
                last = time.time()
                found = {"attempt": attempt, "at": last, "pid": os.getpid(), "step": step, **held(folder / "run")}
                with notes.open("a") as file:
                    file.write(json.dumps(found) + "\n")
            going[0] = float(time.time() < end)
            torch.distributed.all_reduce(going, torch.distributed.ReduceOp.MIN)
            time.sleep(0.02)


# --- the launcher ----------------------------------------------------------------------------------------------


def run(minutes: float, kill_every: float, folder: Path) -> str:
    """What torchrun printed; it has succeeded. ``kill_every``: minutes."""
    end, chance = time.time() + 60 * minutes, random.Random(1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1000", "--monitor-interval", "0.2", "-m", "tests.faults.soak"]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "AUTOPAR_CACHE": str(folder / "cache"),
           "AUTOPAR_FLIGHT": "off", "AUTOPAR_MEMORY": tempfile.mkdtemp(prefix="soak-", dir="/dev/shm")}  # fmt: skip
    printed = folder / "printed"
    with printed.open("w") as out:
        job = subprocess.Popen([*command, "--folder", str(folder), "--end", str(end)], env={**os.environ, **own},
                               cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)  # fmt: skip
        next_kill = time.time() + 60 * kill_every
        while job.poll() is None:
            time.sleep(1.0)
            if time.time() > next_kill and time.time() < end - 60:
                next_kill = time.time() + 60 * kill_every
                ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
                os.kill(int(chance.choice(ranks)), signal.SIGKILL)
    assert job.returncode == 0, printed.read_text()[-5000:]
    left = [path for path in Path(own["AUTOPAR_MEMORY"]).iterdir()]
    shutil.rmtree(own["AUTOPAR_MEMORY"])
    assert not left, f"left in memory: {left}"
    return printed.read_text()


def slope(notes: Sequence[dict[str, Any]], name: str) -> float:
    """The growth per hour."""
    x = torch.tensor([note["at"] for note in notes], dtype=torch.float64)
    y = torch.tensor([float(note[name]) for note in notes], dtype=torch.float64)
    x = (x - x.mean()) / 3600.0
    return float((x * (y - y.mean())).sum() / (x * x).sum())


def report(folder: Path) -> Iterator[str]:
    """Lines: of each rank by start, then of the job."""
    whole = [json.loads(line) for line in (folder / "notes-0").read_text().splitlines()]
    starts = sorted({note["attempt"] for note in whole})
    yield f"{len(starts)} starts, {whole[-1]['step']} steps, {(whole[-1]['at'] - whole[0]['at']) / 60:.0f} minutes"
    for rank in range(2):
        notes = [json.loads(line) for line in (folder / f"notes-{rank}").read_text().splitlines()]
        for start in starts:
            mine = [note for note in notes if note["attempt"] == start]
            mine = mine[len(mine) // 2 :]
            if len(mine) > 5:
                told = ", ".join(f"{name} {mine[-1][name]} ({slope(mine, name):+.1f} per hour)" for name in OF_RANK)
                yield f"rank {rank}, start {start}: {told}"
    for name in OF_JOB:
        later = [note for note in whole if note["attempt"] > 0] or whole
        by_start = [[note[name] for note in whole if note["attempt"] == start][-1] for start in starts]
        yield f"{name}: {slope(later, name):+.1f} per hour; at the end of each start: {by_start}"


def main() -> None:
    """The command, and what torchrun starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=180.0)
    parser.add_argument("--kill-every", type=float, default=15.0, help="minutes")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.end is not None:
        train(given.folder, given.end)
        return
    folder = given.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    run(given.minutes, given.kill_every, folder)
    print("\n".join(report(folder)))


if __name__ == "__main__":
    main()

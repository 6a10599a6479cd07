"""A training run as torchrun starts it, killed or stopped at drawn moments: it resumes from the folder of the run.

    torchrun --max-restarts 3 --nproc-per-node 2 tests/faults/restarted_run.py FOLDER SEED FAULTS PAUSE WHERE WAYS

In each of the first FAULTS attempts one rank comes to grief after a drawn number of calls within autopar, in one of the
WAYS: a signal, or CABLE, for which it waits until FOLDER/fault-N has a second line, by the caller who pulled it.
Rank 0 writes each loss, and when each attempt met and resumed, to FOLDER/losses. WHERE it saves each step: disk, or
memory.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import autopar

OURS = str(Path(autopar.__file__).resolve().parent)
STEPS, ROWS = 12, 8
CALLS = 60_000  # within autopar in such a run: a moment is drawn below, evenly in its logarithm
FIRST = 500
CABLE = "cable"
SIGNALS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.second(torch.tanh(self.first(x))) - y) ** 2).mean()


def batch_of(step: int) -> dict[str, Tensor]:
    """The global batch of a step, on any number of ranks."""
    drawn = torch.Generator().manual_seed(step)
    return {name: torch.randn(ROWS, n, generator=drawn, dtype=torch.float64) for name, n in (("x", 8), ("y", 1))}


def fall(seed: int, attempt: int, rank: int, world: int, note: Path, ways: Sequence[str]) -> None:
    """Arm the fault of this attempt, if this rank is its victim. note: a file that gets the time and the way."""
    chance = random.Random(f"{seed} {attempt}")
    victim, left = chance.randrange(world), int(FIRST * (CALLS / FIRST) ** chance.random())
    way = chance.choice(ways)
    if rank != victim:
        return

    def count(frame: object, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(OURS):  # type: ignore[attr-defined]
            left -= 1
            if left <= 0:
                sys.setprofile(None)
                note.write_text(f"{time.time()} {way}\n")
                while way == CABLE and len(note.read_text().splitlines()) == 1:
                    time.sleep(0.01)
                if way != CABLE:
                    os.kill(os.getpid(), signal.Signals[way])

    sys.setprofile(count)


def main(folder: Path, seed: int, faults: int, pause: float, where: str, ways: Sequence[str]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = len(list(folder.glob("fault-*")))  # each launcher counts its restarts by itself

    def note(**facts: object) -> None:
        if rank == 0:
            with (folder / "losses").open("a") as file:
                file.write(json.dumps({"attempt": attempt, "at": time.time(), "ranks": world, **facts}) + "\n")

    note(what="started")
    if attempt < faults:
        fall(seed, attempt, rank, world, folder / f"fault-{attempt}", ways)
    mesh = autopar.init_mesh("cpu", 60.0, dp="rest")
    note(what="met")
    torch.manual_seed(0)

    def part(step: int) -> dict[str, Tensor]:
        return {name: x.chunk(mesh.data_size)[mesh.data_rank] for name, x in batch_of(step).items()}

    model = autopar.parallelize(Model().double(), mesh, zero=1, example_batch=part(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    note(what="parallelized")
    found = autopar.load(folder / "run", model, optimizer, missing_ok=True)
    note(what="loaded", step=found.step, memory=found.memory)
    keep = {"keep": 2} if where == "disk" else {"memory": True}
    for step in range(found.step, STEPS):
        optimizer.zero_grad()
        loss = float(model.train_step(**part(step)))
        optimizer.step()
        note(what="step", step=step, loss=loss.hex())
        autopar.save(folder / "run", model, optimizer, step=step + 1, **keep)
        note(what="saved", step=step)
        time.sleep(pause)
    sys.setprofile(None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5], sys.argv[6].split(","))

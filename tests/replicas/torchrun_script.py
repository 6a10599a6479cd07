"""A training script as users start it, once per replica.

torchrun --max-restarts 3 --nproc-per-node 2 tests/replicas/torchrun_script.py STEPS PAUSE FILE [STEP]

The last rank of replica 1 dies in its first start, at a STEP. PAUSE: seconds of each step, in the place of a larger
model.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import autopar
from tests.replicas.run import Model, shard_of


def main(steps: int, pause: float, file: Path, dies: int) -> None:
    mesh = autopar.init_mesh("cpu", tp="rest")
    torch.manual_seed(0)
    model = autopar.parallelize(Model().double(), mesh, example_batch=shard_of(0, 0), replicas=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replicas = autopar.Replicas(model, optimizer)
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    while replicas.step < steps:
        if (replicas.index, rank, attempt, replicas.step) == (1, mesh.size() - 1, 0, dies):
            os.kill(os.getpid(), signal.SIGKILL)
        loss = float(replicas.train_step(shard_of))
        optimizer.step()
        if rank == 0:
            with file.open("a") as out:
                told = {"index": replicas.index, "attempt": attempt, "step": replicas.step - 1, "loss": loss}
                out.write(json.dumps({**told, "members": replicas.members}) + "\n")
        time.sleep(pause)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else -1)

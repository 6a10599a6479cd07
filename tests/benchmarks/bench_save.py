"""What a save costs a run: at once, beside the training, into memory of two nodes; and against torch's own async_save.

    python tests/benchmarks/bench_save.py [--rounds 5]

A float32 Llama with AdamW on two processes, ZeRO-1; 128 tokens per rank and step.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import SMALL, Workload, load, publish, slowest, table

import autopar

WORK = Workload(hidden=768, layers=8, inner=2048, heads=12, vocab=16384, batch=2, length=128)
Row = dict[str, float]


def timed(call: Callable[[], Any]) -> float:
    """Seconds of the slowest rank, begun together."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return slowest(time.perf_counter() - start)


class Trained:
    """A model that makes steps."""

    def __init__(self, work: Workload) -> None:
        mesh = autopar.init_mesh("cpu", dp=2)
        part, parts = autopar.dp_rank_and_size(mesh)
        self.batch = {name: x.chunk(parts)[part] for name, x in work.tokens().items()}
        self.model = autopar.parallelize(work.model(), mesh, zero=1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.waited = 0.0

    def step(self) -> None:
        """Forward, backward and the optimizer's step."""
        self.model.train_step(**self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: str, **how: Any) -> Any:
        """By autopar; what a step waits for the copies is in ``waited``."""
        saving = autopar.save(folder, self.model, self.optimizer, **how)
        until, self.waited = saving.wait_staged, 0.0

        def wait() -> None:
            start = time.perf_counter()
            until()
            self.waited += time.perf_counter() - start

        saving.wait_staged = wait
        return saving

    def state(self) -> dict[str, Any]:
        """For torch's own functions."""
        names = {id(p): n for n, p in self.model.named_parameters()}
        states = self.optimizer.state.items()
        moments = {f"{names[id(p)]}.{key}": x for p, state in states for key, x in state.items()}
        return {"model": self.model.state_dict(), "optimizer": moments}


def at_once(run: Trained, folder: str) -> Row:
    return {"call": timed(lambda: run.save(folder, keep=1))}


LATER, MEMORY = {"asynchronous": True, "keep": 1}, {"memory": True}


def beside(run: Trained, folder: str, plain: float, how: Mapping[str, Any]) -> Row:
    """``call`` and ``waited`` are what the training does not do meanwhile; ``slower``: what its steps take more."""
    start, found = time.perf_counter(), []
    call = timed(lambda: found.append(run.save(folder, **how)))
    (saving,) = found
    waited, slower, steps = 0.0, 0.0, 0
    while slowest(float(not saving.done)) or steps < 2:  # all ranks make as many
        took, steps = timed(run.step), steps + 1
        waited = max(waited, slowest(run.waited))
        slower += took - plain
    saving.wait()
    return {"call": call, "waited": waited, "slower": slower - waited, "until done": time.perf_counter() - start}


def copied(run: Trained, folder: str, how: Mapping[str, Any]) -> Row:
    """Where the next thing after the call is a step of the optimizer, with no forward and backward in between."""
    start, found = time.perf_counter(), []
    call = timed(lambda: found.append(run.save(folder, **how)))
    waited = timed(found[0].wait_staged)
    found[0].wait()
    return {"call": call, "waited": waited, "until done": time.perf_counter() - start}


def of_torch(run: Trained, folder: str, asynchronous: bool) -> Row:
    """`torch.distributed.checkpoint`: without waiting for the disk, and without the rest of the run."""
    shutil.rmtree(folder, ignore_errors=True)
    if not asynchronous:
        return {"call": timed(lambda: dcp.save(run.state(), checkpoint_id=folder))}
    futures: list[Any] = []
    call = timed(lambda: futures.append(dcp.async_save(run.state(), checkpoint_id=folder)))
    futures[0].result()
    return {"call": call}


def rank(rounds: int, work: Workload) -> dict[str, Row] | None:
    """The median of each time over the rounds."""
    warnings.simplefilter("ignore")
    memory = Path(f"/dev/shm/autopar-bench-{os.environ['RANK']}")  # a node of its own
    os.environ["AUTOPAR_MEMORY"] = str(memory)
    run, rows = Trained(work), dict[str, list[Row]]()
    for _ in range(3):
        run.step()
    base = [tempfile.mkdtemp(dir=".") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(base)
    try:
        for i in range(rounds + 1):
            plain = statistics.median(timed(run.step) for _ in range(3))
            found = {
                "at once": at_once(run, f"{base[0]}/now"),
                "beside the training": beside(run, f"{base[0]}/later", plain, LATER),
                "beside, an optimizer's step at once": copied(run, f"{base[0]}/later", LATER),
                "in memory": beside(run, f"{base[0]}/memory", plain, MEMORY),
                "in memory, an optimizer's step at once": copied(run, f"{base[0]}/memory", MEMORY),
                "torch's save": of_torch(run, f"{base[0]}/torch", False),
                "torch's async_save": of_torch(run, f"{base[0]}/torch_async", True),
                "a step": {"call": plain},
            }
            for name, row in found.items():
                rows.setdefault(name, []).extend([row] if i else [])
        sizes = [p.stat().st_size for p in Path(base[0], "now").rglob("*.safetensors")]
        medians = {n: {k: statistics.median(r[k] for r in found) for k in found[0]} for n, found in rows.items()}
        medians["bytes"] = {"all": float(sum(sizes)), "most": float(max(sizes))}
        return medians if dist.get_rank() == 0 else None
    finally:
        dist.barrier()
        shutil.rmtree(memory)
        if dist.get_rank() == 0:
            shutil.rmtree(base[0])


def main() -> None:
    """Measure, and write the table to docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="try the script, publish nothing")
    given = parser.parse_args()
    found = autopar.launch(rank, 2, (given.rounds, SMALL if given.small else WORK), device="cpu")[0]
    size, whole = found.pop("bytes"), found["at once"]["call"]
    rows = []
    for name, row in found.items():
        stops = row["call"] + row.get("waited", 0.0)
        share = "" if name == "a step" else f"{stops / whole:.3f}"
        cells = [f"{row[k]:.3f}" if k in row else "" for k in ("call", "waited", "slower", "until done")]
        rows.append([name, *cells, share])
    text = (
        f"{load()}; {size['all'] / 2**20:.0f} MiB, at most {size['most'] / 2**20:.0f} MiB of them by one rank; "
        f"medians of {given.rounds} rounds, in seconds.\n\n"
    )
    head = ["", "the call", "the next step waits", "steps are slower by, in sum", "until complete", "stops / at once"]
    print(text + table(head, rows)) if given.small else publish("saving", text + table(head, rows))


if __name__ == "__main__":
    main()

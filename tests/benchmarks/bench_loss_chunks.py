"""Losses in chunks of tokens over a vocabulary of 131072: what a step holds, and how long it takes.

Forward and backward of a Llama of one layer on one process, so that the head is nearly all of it. Peaks are those of a
meter and those that a plan says; times of whole logits and of chunks are taken in turns.

    python tests/benchmarks/bench_loss_chunks.py [--rounds 3] [--small]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import torch
from common import Workload, publish

import autopar
from autopar.compile.model import compile_model
from autopar.cost.memory import memory
from autopar.ir.mesh import Mesh
from tests.benchmarks.meter import Meter
from tests.support.ranks import run_ranks

HEAD = Workload(hidden=256, layers=1, inner=512, heads=4, vocab=131072, batch=4, length=512)
CHUNKS = (1, 4, 16)
LARGE = 64  # of 8192 tokens


def made(work: Workload, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A module that has made a step, and its batch."""
    mesh = autopar.init_mesh("cpu", 600.0, dp=1)
    parallel, batch = autopar.parallelize(work.model(), mesh, **options), work.tokens()
    parallel.train_step(**batch)
    parallel.zero_grad()
    return parallel, batch


def peaks(work: Workload, parallel: Any, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """(metered, said) MB of a step, without an optimizer."""
    with Meter([list(parallel.parameters()), list(parallel.buffers()), batch]) as meter:
        parallel.train_step(**batch)
    parallel.zero_grad()
    said = memory(compile_model(work.model(), batch, Mesh.of(dp=1), plan=parallel.plan, outputs=()))
    return meter.peak / 1e6, (said.peak - said.optimizer) / 1e6


def formula(work: Workload, chunks: int) -> float:
    """MB of what has the size of the vocabulary: two weights and, at the end, their gradients; or logits of a chunk,
    their gradient, and that of the head so far, which is not there yet where a chunk is all."""
    weight, logits = work.vocab * work.hidden * 4, work.batch * work.length // chunks * work.vocab * 4
    head = max(2 * logits, weight + logits) if chunks == 1 else weight + 2 * logits
    return (2 * weight + max(2 * weight, head)) / 1e6


def table(small: bool, rounds: int) -> str:
    """On the one rank."""
    work = replace(HEAD, vocab=4096) if small else HEAD
    steps = {chunks: made(work, loss_chunks=chunks) for chunks in CHUNKS}
    rows = [
        "| tokens | chunks | processor s, min | to whole logits | peak MB | said | formula |",
        "|---|---|---|---|---|---|---|",
    ]
    seconds: dict[int, list[float]] = {chunks: [] for chunks in CHUNKS}
    held = {chunks: peaks(work, *steps[chunks]) for chunks in CHUNKS}
    for _ in range(rounds):
        for chunks, (parallel, batch) in steps.items():
            start = time.process_time()
            parallel.train_step(**batch)
            seconds[chunks].append(time.process_time() - start)
            parallel.zero_grad()
    for chunks, found in seconds.items():
        (mb, said), size = held[chunks], work.batch * work.length
        times = f"{min(found):.2f} | {min(found) / min(seconds[1]):.2f}"
        rows.append(f"| {size} | {chunks} | {times} | {mb:.0f} | {said:.0f} | {formula(work, chunks):.0f} |")
    large = replace(work, batch=4 * work.batch)
    mb, said = peaks(large, *made(large, loss_chunks=LARGE))
    rows.append(f"| {4 * size} | {LARGE} | | | {mb:.0f} | {said:.0f} | {formula(large, LARGE):.0f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="to try the harness itself: nothing is written")
    args = parser.parse_args()
    (text,) = run_ranks(1, table, args.small, args.rounds, timeout=3600.0)
    print(text) if args.small else publish("loss chunks", text)


if __name__ == "__main__":
    main()

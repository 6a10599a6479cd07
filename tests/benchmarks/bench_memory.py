"""Whole training steps that save memory, ours against torch's: ZeRO with microbatches, mixed precision, replicas.

Forward, backward and AdamW; checked first as `bench_peers` does, then in turns.

    python tests/benchmarks/bench_memory.py [--rounds 5] [--only zero|precision|replicas] [--small]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import memory_peers as peers
import torch
from bench_peers import LIMITS, Make, Outcome, measured, report
from common import SMALL, Workload, load, publish

import autopar

HALF = torch.bfloat16
ZERO: dict[str, Make] = {
    "DDP": partial(peers.ddp, count=4),
    "DDP, ZeroRedundancyOptimizer": partial(peers.ddp, count=4, zero=True),
    "FSDP2, no reshard, summed once": partial(peers.fsdp2, count=4, each=False, reshard=False),
    "FSDP2, no reshard": partial(peers.fsdp2, count=4, reshard=False),
    "FSDP2": partial(peers.fsdp2, count=4),
    **{f"DeepSpeed ZeRO-{n}": partial(peers.deepspeed, count=4, stage=n) for n in (1, 2, 3) if peers.has_deepspeed()},
    **{f"autopar zero={zero}": partial(peers.ours, count=4, zero=zero) for zero in range(4)},
}
PRECISION: dict[str, Make] = {
    "DDP, autocast": partial(peers.ddp, count=1, dtype=HALF),
    "FSDP2, MixedPrecisionPolicy": partial(peers.fsdp2, count=1, dtype=HALF),
    "autopar bf16": partial(peers.ours, count=1, precision="bf16"),
    "autopar bf16, zero=3": partial(peers.ours, count=1, precision="bf16", zero=3),
}
REPLICAS: dict[str, Make] = {
    "FSDP2 over 4 ranks": partial(peers.fsdp2, count=2),
    "FSDP2, 2 replicas": partial(peers.fsdp2, count=2, replicas=2),
    "autopar dp=4, zero=3": partial(peers.ours, count=2, zero=3),
    "autopar dp_replicate=2, dp=2, zero=3": partial(peers.ours, count=2, zero=3, replicas=2),
}
OPPONENTS: Mapping[str, tuple[str, ...]] = {
    "autopar zero=0": ("DDP",),
    "autopar zero=1": ("DDP, ZeroRedundancyOptimizer", "FSDP2, no reshard, summed once", "DeepSpeed ZeRO-1"),
    "autopar zero=2": ("FSDP2, no reshard", "DeepSpeed ZeRO-2"),
    "autopar zero=3": ("FSDP2", "DeepSpeed ZeRO-3"),
    "autopar bf16": ("DDP, autocast",),
    "autopar bf16, zero=3": ("FSDP2, MixedPrecisionPolicy",),
    "autopar dp=4, zero=3": ("FSDP2 over 4 ranks",),
    "autopar dp_replicate=2, dp=2, zero=3": ("FSDP2, 2 replicas",),
}
BFLOAT16 = 2e-3, 0.3  # of the loss; of a gradient's worst entry, which one process in bfloat16 has as well
SETS: dict[str, tuple[dict[str, Make], int, tuple[float, float]]] = {
    "zero": (ZERO, 2, LIMITS),
    "precision": (PRECISION, 2, BFLOAT16),
    "replicas": (REPLICAS, 4, LIMITS),
}


def main() -> None:
    """Run the ranks, print the tables, write them to docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", choices=["", *SETS])
    parser.add_argument(
        "--small", action="store_true", help="a small model, to try the harness; the page is left alone"
    )
    chosen = parser.parse_args()
    workload = replace(SMALL, batch=8) if chosen.small else Workload(batch=8, length=256)
    for name in [chosen.only] if chosen.only else SETS:
        before = load()
        arguments = (workload, name, chosen.rounds)
        ranks = SETS[name][1]
        found: dict[str, Outcome] = autopar.launch(_work, nproc=ranks, args=arguments, timeout=300, device="cpu")[0]
        text = report(found, chosen.rounds, before, OPPONENTS)
        print(text) if chosen.small else publish(f"memory {name}", text)


def _work(workload: Workload, name: str, rounds: int) -> dict[str, Outcome]:
    make, _, limits = SETS[name]
    return measured(make, workload, list(make), rounds, limits)


if __name__ == "__main__":
    main()

"""What treats every token by itself, in tiles of 65536 tokens: what a step holds, and how long it takes.

Forward and backward of a Llama of two layers on one process, whose backward recomputes each layer. Peaks are those of a
meter and those that a plan says; times of whole regions and of tiles are taken in turns.

    python tests/benchmarks/bench_tiles.py [--rounds 3] [--small]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from bench_loss_chunks import made, peaks
from common import Workload, publish

from tests.support.ranks import run_ranks

MODEL = Workload(hidden=128, layers=2, inner=1024, heads=2, vocab=256, batch=32, length=2048)
TILES = (1, 4, 16)


def table(small: bool, rounds: int) -> str:
    """On the one rank."""
    work = replace(MODEL, batch=1) if small else MODEL
    steps = {tiles: made(work, tiles=tiles, activation_checkpoint="full", loss_chunks=16) for tiles in TILES}
    rows = ["| tokens | tiles | processor s, min | to whole | peak MB | said |", "|---|---|---|---|---|---|"]
    held = {tiles: peaks(work, *steps[tiles]) for tiles in TILES}
    seconds: dict[int, list[float]] = {tiles: [] for tiles in TILES}
    for _ in range(rounds):
        for tiles, (parallel, batch) in steps.items():
            start = time.process_time()
            parallel.train_step(**batch)
            seconds[tiles].append(time.process_time() - start)
            parallel.zero_grad()
    for tiles, found in seconds.items():
        times = f"{min(found):.2f} | {min(found) / min(seconds[1]):.2f}"
        peak, said = held[tiles]
        rows.append(f"| {work.batch * work.length} | {tiles} | {times} | {peak:.0f} | {said:.0f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="to try the harness itself: nothing is written")
    args = parser.parse_args()
    (text,) = run_ranks(1, table, args.small, args.rounds, timeout=3600.0)
    print(text) if args.small else publish("tiles", text)


if __name__ == "__main__":
    main()

"""Where the time goes from a fault to the first step after it: two ranks under torchrun, several restarts.

    python -m tests.faults.restart_times

notice: until the launcher starts the ranks anew; start: Python and imports, until all have met; compile: capture and
plan, from the cache; load: the checkpoint; step: compiling the step, from the cache, and making it.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.faults.test_restarts import agent, ended, noted

PARTS = ("notice", "start", "compile", "load", "step")


def restarts(folder: Path) -> Iterator[list[float]]:
    """Of each restart, the seconds of each part."""
    notes = noted(folder)
    for fault in sorted(folder.glob("fault-*")):
        attempt = int(fault.name.partition("-")[2]) + 1
        mine = [note for note in notes if note["attempt"] == attempt]
        at = {note["what"]: note["at"] for note in reversed(mine)}
        if "step" in at:
            moments = [
                float(fault.read_text().split()[0]),
                *(at[n] for n in ("started", "met", "parallelized", "loaded", "step")),
            ]
            yield [b - a for a, b in itertools.pairwise(moments)]


def main() -> None:
    """Print a table."""
    print("| | " + " | ".join(PARTS) + " |")
    for where in ("disk", "memory"):
        rows = []
        for seed in (0, 1, 2):
            with tempfile.TemporaryDirectory() as name:
                ended(agent(Path(name), "--standalone", "--nproc-per-node", "2", seed=seed, faults=3, where=where))
                rows += restarts(Path(name))
        found = [f"{statistics.median(part):.2f} s" for part in zip(*rows)]
        print(f"| {where}, {len(rows)} restarts | " + " | ".join(found) + " |", flush=True)


if __name__ == "__main__":
    main()

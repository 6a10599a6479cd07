"""What the generated code costs where there is nothing to parallelize: a mesh of one process against the plain model.

    python tests/benchmarks/bench_overhead.py [--rounds 9] [--eager]

Two sizes: one bound by compute, one by the overhead of launching many small operators.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import Workload, interleaved, load, publish, ratio, table
from peers import eager
from torch import Tensor

import autopar

SIZES = {
    "compute-bound": Workload(batch=1),
    "overhead-bound": Workload(hidden=64, layers=8, inner=128, heads=4, vocab=256, batch=1, length=16),
}
BACKENDS = {"eager": "plain eager", "inductor": "torch.compile"}


def main() -> None:
    """Time all, print the table, write it to docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--eager", action="store_true", help="without the compiled ones; the page is then left alone")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    before = load()
    rows = [row for name, work in SIZES.items() for row in _rows(name, work, chosen.rounds, chosen.eager)]
    head = [
        "",
        "",
        "ms, min",
        "to plain eager: min",
        "median",
        "processor",
        "to its counterpart: min",
        "median",
        "processor",
    ]
    text = f"{chosen.rounds} rounds; {before} before, {load().split(' on ')[0]} after.\n\n{table(head, rows)}"
    print(text) if chosen.eager else publish("overhead", text)


def _rows(size: str, work: Workload, rounds: int, eager_only: bool) -> list[list[str]]:
    batch, mesh = work.tokens(), autopar.init_mesh(device="cpu")
    steps = {"plain eager": eager(work.model(), batch)}
    steps["autopar eager"] = _ours(autopar.parallelize(work.model(), mesh), batch)
    if not eager_only:
        steps["torch.compile"] = eager(torch.compile(work.model()), batch)
        steps["autopar inductor"] = _ours(autopar.parallelize(work.model(), mesh, backend="inductor"), batch)
    expected = float(steps["plain eager"]())
    for name, step in steps.items():
        found = float(step())
        assert abs(found - expected) < 1e-5 * expected, f"{name}: loss {found}, needs {expected}"
    times = interleaved(steps, rounds if work.hidden > 100 else 10 * rounds, warmup=3)
    out = []
    for name, seconds in times.items():
        counterpart = BACKENDS.get(name.removeprefix("autopar "), "")
        cells = [f"{x:.2f}" for x in ratio(seconds, times["plain eager"])]
        cells += [f"{x:.2f}" for x in ratio(seconds, times[counterpart])] if counterpart else [""] * 3
        out.append([size, name, f"{min(seconds.wall) * 1e3:.1f}", *cells])
    return out


def _ours(model: autopar.ParallelModule, batch: dict[str, Tensor]) -> Callable[[], Any]:
    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        return model.train_step(**batch).detach()

    return step


if __name__ == "__main__":
    main()

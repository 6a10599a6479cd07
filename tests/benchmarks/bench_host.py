"""What a step costs the host besides its generated code: checks before it, slots, gradients into `.grad`.

    python tests/benchmarks/bench_host.py [--steps 600]

A Llama of 4 layers of width 64, 39 parameters, 16 tokens, on one process. The time within step graphs is taken off.
Of the host's part, the guards: what is compared of modules and of what their forwards read, and how long that takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import Workload, load, publish, table

import autopar
from autopar.runtime.exec.lowering import Lowered
from autopar.runtime.guards.module_guards import ModuleGuards

WORK = Workload(hidden=64, layers=4, inner=128, heads=4, vocab=256, batch=1, length=16)
TENTH = 10  # of the steps are faster than what the table shows


def main() -> None:
    """Time the steps, write the table to docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    steps = parser.parse_args().steps
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    before = load()
    model, batch = autopar.parallelize(WORK.model(), autopar.init_mesh(device="cpu")), WORK.tokens()
    rows = []
    for name, clear in (("gradients are new", True), ("gradients are added", False)):
        for _ in range(20):
            model.train_step(**batch)
        whole, outside = zip(*(_one(model, batch, clear) for _ in range(steps)), strict=True)
        cells = [f"{pick(x) * 1e3:.2f}" for x in (whole, outside) for pick in (min, _tenth, statistics.median)]
        rows.append([name, *cells])
    head = ["", "step, ms: min", "fastest tenth", "median", "beside generated code: min", "fastest tenth", "median"]
    loads = f"{steps} steps; {before} before, {load().split(' on ')[0]} after."
    publish("host", f"{loads}\n\n{table(head, rows)}\n\n{_guards(model, steps)}")


def _guards(model: autopar.ParallelModule, steps: int) -> str:
    """How many guards a step has, and what one look at them takes."""
    watch = ModuleGuards(model._tree.root)
    assert watch.holds(), "nobody has changed anything"
    seconds = sorted(timeit.repeat(watch.holds, number=1, repeat=steps))
    cells = ", ".join(f"{x * 1e6:.0f}" for x in (seconds[0], _tenth(seconds), statistics.median(seconds)))
    return (
        f"Of that, a look at the modules and at {watch.guards} values that forwards read, us: {cells} (min, fastest "
        "tenth, median)."
    )


def _tenth(seconds: Any) -> float:
    return sorted(seconds)[len(seconds) // TENTH]


def _one(model: autopar.ParallelModule, batch: dict[str, torch.Tensor], clear: bool) -> tuple[float, float]:
    """(seconds of a step, those of them that no step graph ran)"""
    within = 0.0
    run: Callable[..., Any] = Lowered.__call__

    def timed(bound: Lowered, inputs: list[Any]) -> Any:
        nonlocal within
        start = time.perf_counter()
        out = run(bound, inputs)
        within += time.perf_counter() - start
        return out

    if clear:
        model.zero_grad(set_to_none=True)
    Lowered.__call__ = timed  # type: ignore[method-assign]
    try:
        start = time.perf_counter()
        model.train_step(**batch)
        seconds = time.perf_counter() - start
    finally:
        Lowered.__call__ = run  # type: ignore[method-assign]
    return seconds, seconds - within


if __name__ == "__main__":
    main()

"""Constants of a stack fitted to a third of its published rows, and how far the other rows are off.

    python -m tests.benchmarks.bench_calibrate [--only research-3d] [--seeds 3]

Every fit starts at the same neutral constants, and not at those of the table, which were fitted to all rows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from autopar.auto.priced_layouts import LayoutPricer
from autopar.auto.stack_fit import MeasuredStep, fitted, measured_rows
from autopar.cost.efficiency import Stack, stack_named
from tests.cost.test_published_layouts import entries, with_cluster

SETS = {
    "vTrain, one node, small models": ("vTrain-single",), "vTrain, 512 A100": ("vTrain-multi",),
    "Hagemann et al. 2023, sweeps": ("Hagemann23",), "llm-foundry": ("llm-foundry-A100", "llm-foundry-H100"),
    "zero bubble table 4": ("ZeroBubble-T4",),
}  # fmt: skip


def neutral(stack: Stack) -> Stack:
    """Its switches, with constants that nobody has fitted."""
    shares = {kernel: 0.4 for kernel in stack.attention}
    kernels = {k: {n: 0.6 if n == "memory" else v for n, v in row.items()} for k, row in stack.kernels.items()}
    return replace(
        stack, products=0.6, attention=shares, attention_backward=shares, memory=0.6, inside=0.7, network=0.6,
        launch=20e-6 if stack.launch > 1e-5 else 8e-6, jitter=0.0, kernels=kernels,
    )  # fmt: skip


def steps_by_stack(sources: Sequence[str]) -> dict[tuple[str, str], list[MeasuredStep]]:
    """(stack, chip) -> its measured rows."""
    found: dict[tuple[str, str], list[MeasuredStep]] = {}
    with tempfile.TemporaryDirectory() as folder:
        chosen = [e["row"] for e in entries() if e["source"] in sources and "measured" in e["row"]]
        rows = [with_cluster(row, Path(folder)) for row in chosen]
        for before, row in zip(chosen, rows, strict=True):
            pricer = _PRICERS.setdefault(json.dumps(row["config"]), LayoutPricer())
            (step,) = measured_rows([json.dumps(row)], pricer)
            found.setdefault((before["stack"], step.cluster.chip_name), []).append(step)
        _PRICERS.clear()
    return found


_PRICERS: dict[str, LayoutPricer] = {}


def errors(steps: Sequence[MeasuredStep], stack: Stack) -> np.ndarray:
    """|predicted / measured - 1|"""
    return np.abs([step.predicted(stack) / step.seconds - 1 for step in steps])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print("| rows of | stack | fitted to | others | median | 90 % below | largest |\n|---|---|---|---|---|---|---|")
    for name, sources in SETS.items():
        if args.only not in name:
            continue
        for (stack_name, chip), steps in steps_by_stack(sources).items():
            start, off = neutral(stack_named(stack_name, chip)), []
            if len(steps) < 9:
                parts = [[i] for i in range(len(steps))] if len(steps) > 4 else []  # each is left out once
            else:
                rng = np.random.default_rng(0)
                parts = [np.setdiff1d(np.arange(len(steps)), rng.choice(len(steps), len(steps) // 3, replace=False))
                         for _ in range(args.seeds)]  # fmt: skip
            for left in parts:
                fit = fitted(start, [s for i, s in enumerate(steps) if i not in set(map(int, left))])
                off.append(errors([steps[int(i)] for i in left], fit.stack))
            if off:
                all_of, count = np.concatenate(off), len(parts[0])
                print(f"| {name} | {stack_name}, {chip} | {len(steps) - count} | {count} | {np.median(all_of):.1%} | "
                      f"{np.quantile(all_of, 0.9):.1%} | {all_of.max():.1%} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

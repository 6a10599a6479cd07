"""Three measured meshes of CPU ranks and `autopar calibrate` order five others.

python -m tests.benchmarks.bench_auto_meshes [--rounds 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.auto.costed_model import CostedModel
from autopar.auto.machine import this_machine
from autopar.auto.stack_fit import MeasuredStep, fitted
from autopar.auto.timed_steps import slowest
from autopar.cli.calibration_ranks import calibrated
from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import stack_from
from autopar.cost.layout import Layout
from autopar.models import hf_configs as hf
from autopar.options import Options

RANKS, BATCH, SEQ = 4, 16, 128
CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 2048, "tie_word_embeddings": False,
}  # fmt: skip
MEASURED = (("dp=4", {}), ("tp=4", {"sequence_parallel": True}), ("pp=4", {"microbatches": 4, "schedule": "1f1b"}))
OTHERS = (
    ("dp=4", {"zero": 3}), ("dp=2,tp=2", {"sequence_parallel": True}),
    ("pp=2,dp=2", {"microbatches": 4, "schedule": "1f1b"}), ("dp=4", {"activation_checkpoint": "full"}),
    ("pp=4", {"microbatches": 16, "schedule": "1f1b"}),
)  # fmt: skip


def sizes(mesh: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in (pair.split("=") for pair in mesh.split(","))}


def rank(rounds: int) -> tuple[str, list[float]]:
    """(text of the measured stack, seconds of each mesh), measured in turns."""
    text, _ = calibrated("autopar-eager")
    runs = []
    for mesh, options in (*MEASURED, *OTHERS):
        torch.manual_seed(0)
        model = hf.build(hf.config_of(CONFIG), torch.float32, "cpu")
        parallel = autopar.parallelize(model, autopar.init_mesh(**sizes(mesh)), **options)
        tokens = torch.randint(CONFIG["vocab_size"], (BATCH // parallel.plan.mesh.data_size, SEQ))
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-5)
        runs.append((parallel, optimizer, {"input_ids": tokens, "labels": tokens}))
    times: list[list[float]] = [[] for _ in runs]
    for i in range(rounds + 1):
        for k, (parallel, optimizer, batch) in enumerate(runs):
            dist.barrier()
            start = time.perf_counter()
            parallel.train_step(**batch)
            optimizer.step()
            optimizer.zero_grad()
            if i:
                times[k].append(slowest(time.perf_counter() - start, torch.device("cpu")))
            else:
                slowest(0.0, torch.device("cpu"))
    return text, [statistics.median(one) for one in times]


def cluster() -> Cluster:
    return replace(this_machine(RANKS).cluster)


def steps(seconds: list[float]) -> list[MeasuredStep]:
    model, nodes = CostedModel.from_config(CONFIG, SEQ, "float32"), cluster()
    found = []
    for (mesh, options), time_ in zip((*MEASURED, *OTHERS), seconds, strict=True):
        layout = Layout.of(sizes(mesh), Options(**options), BATCH)
        found.append(MeasuredStep(layout, model.costs(layout.placement, layout.micro_batch), nodes, time_))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.json is not None and args.json.exists():
        text, seconds = json.loads(args.json.read_text())
    else:
        text, seconds = autopar.launch(rank, RANKS, (args.rounds,), device="cpu")[0]
        if args.json is not None:
            args.json.write_text(json.dumps([text, seconds]))
    ((chip, row),) = json.loads(text).items()
    report(stack_from("measured", chip, row), steps(seconds))


def report(stack: Any, measured: list[MeasuredStep]) -> None:
    """Print seconds of each mesh, and how many pairs of the five others are in order."""
    fit = fitted(stack, measured[: len(MEASURED)])
    print("\n".join(fit.lines()))
    print("| mesh | measured | calibrated | and fitted to the first three |\n|---|---|---|---|")
    for (mesh, options), step in zip((*MEASURED, *OTHERS), measured, strict=True):
        print(f"| {mesh} {options or ''} | {1e3 * step.seconds:.0f} ms | {1e3 * step.predicted(stack):.0f} ms | "
              f"{1e3 * step.predicted(fit.stack):.0f} ms |")  # fmt: skip
    for name, one in (("calibrated", stack), ("and fitted", fit.stack)):
        rest = [(step.seconds, step.predicted(one)) for step in measured[len(MEASURED) :]]
        pairs = [(a, b) for a, b in itertools.combinations(rest, 2) if abs(a[0] / b[0] - 1) > 0.05]
        right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
        print(f"{name}: {right} of {len(pairs)} pairs of the five others that differ by 5 % in order")


if __name__ == "__main__":
    main()

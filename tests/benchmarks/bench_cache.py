"""What the cache of compiled steps saves for real models on large meshes: processor time to plan and step of one rank,
compiled, and read from disk by another process, which captures the model to know what to read. Imports and the model's
own construction are left out of both.

    python tests/benchmarks/bench_cache.py [--only llama_8b]

A process of its own reads, as after a restart. Of a pipeline one rank's graphs are made.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from bench_real_models import CASES
from common import load, publish, table

from autopar.cache.compile_cache import stored_plan, stored_step
from autopar.cache.disk_cache import DiskCache
from autopar.cache.step_codec import StoredStep
from autopar.compile.shared_capture import SharedCapture
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.steps.of_rank import graphs_of_rank

CHOSEN = ("llama_8b", "llama_405b", "mixtral_8x22b", "t5_11b", "vit_22b")


def measured(name: str) -> str:
    """Seconds for the plan, the step and the graphs of a rank, the number of its nodes, and whether it was read."""
    case = CASES[name]
    model, inputs, mesh, options = case.build(), case.inputs(), Mesh.of(**case.mesh), Options(**case.options)
    times = [time.process_time()]
    shared = SharedCapture()
    stored_plan(model, inputs, mesh, options, shared=shared)
    times.append(time.process_time())
    step = stored_step(model, inputs, mesh, options, outputs=(), shared=shared)
    times.append(time.process_time())
    graphs = graphs_of_rank(step.pipeline, step.prologue, mesh.size("pp") // 2)
    nodes = sum(len(graph.graph.nodes) for graph, _ in graphs.values())
    times.append(time.process_time())
    seconds = [f"{b - a:.3f}" for a, b in itertools.pairwise(times)]
    return " ".join([*seconds, str(nodes), str(int(isinstance(step, StoredStep)))])


def _row(name: str) -> list[object]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "AUTOPAR_CACHE": folder}
        command = [sys.executable, __file__, "--measure", name]
        made, read = (
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()[-5:]
            for _ in range(2)
        )
        nbytes = sum(entry.nbytes for entry in DiskCache(Path(folder)).entries())
    assert made[-1] == "0" and read[-1] == "1", (made, read)
    compiled = sum(map(float, made[:3]))
    plan, step, graphs = map(float, read[:3])
    mesh = " ".join(f"{axis}={size}" for axis, size in CASES[name].mesh.items())
    times = (compiled, plan, step, graphs, plan + step + graphs)
    return [name, mesh, int(read[3]), *(f"{s:.2f}" for s in times), f"{nbytes / 1024:.0f}"]


def main() -> None:
    """Compile and read each, print the table, write it to docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(CHOSEN), help="another choice leaves the page alone")
    parser.add_argument("--measure", help="one model, in this process")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if chosen.measure:
        print(measured(chosen.measure))
        return
    before = load()
    columns = ["model", "mesh", "nodes of a rank", "compiled", "plan", "step", "graphs", "from disk", "KiB"]
    text = f"{before}.\n\n{table(columns, [_row(name) for name in chosen.only.split(',')])}"
    publish("cache", text) if chosen.only == parser.get_default("only") else print(text)


if __name__ == "__main__":
    main()

"""How long compiling takes: everything before `bind`, by stage, against the number of layers and the size of the mesh.

    python tests/benchmarks/bench_compile.py [--layers 2,8,32]

Nothing runs, no rank is started: meshes may be larger than the machine.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from common import Workload, load, publish, table

from autopar.adapters.copying.fake import skeleton_of
from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.models import hf as hf  # knows transformers models
from autopar.options import Options
from autopar.steps.of_rank import backwards

MESHES = {
    "one process": (Mesh.of(dp=1), Options()),
    "dp=2 tp=2": (Mesh.of(dp=2, tp=2), Options(zero=3, sequence_parallel=True)),
    "dp=64 tp=4": (Mesh.of(dp=64, tp=4), Options(zero=3, sequence_parallel=True)),
}
STAGES = ("capture", "plan", "propagate_placements", "lower_to_local", "differentiate")


def main() -> None:
    """Compile all, print the table, write it to docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="2,8,32", help="another choice leaves the page alone")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    before = load()
    _row(1, "dp=2 tp=2")  # imports, caches
    rows = [_row(int(layers), name) for layers in chosen.layers.split(",") for name in MESHES]
    text = f"{before}.\n\n{table(['layers', 'mesh', 'nodes F + B', 'seconds', *STAGES, 'rest'], rows)}"
    publish("compile", text) if chosen.layers == parser.get_default("layers") else print(text)


def _row(layers: int, name: str) -> list[object]:
    mesh, options = MESHES[name]
    work = Workload(hidden=256, heads=8, layers=layers, batch=mesh.size("dp") * 2, length=256)
    model = skeleton_of(work.model())
    start = time.perf_counter()
    found = compile_model(model, work.tokens(), mesh, options, outputs=())
    seconds = time.perf_counter() - start
    nodes = [len(step.graph.graph.nodes) for step in (found.stage.forward, *backwards(found.stage))]
    stages = [found.timings.get(stage, 0.0) for stage in STAGES]
    return [layers, name, f"{nodes[0]} + {nodes[1]}", *(f"{s:.2f}" for s in (seconds, *stages, seconds - sum(stages)))]


if __name__ == "__main__":
    main()

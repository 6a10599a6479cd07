"""How much of the communication of a step is beside its computation, on slowed links and a slowed device.

Real ranks run the real step of a Llama; each kernel and each transfer takes what the cost model says, by a clock of its
own or in real time, stretched until this machine's arithmetic does not matter (`tests.support.slow_links`). The links
of tp are as slow as the exchanges of a forward take as long as its products, those of dp as what a backward exchanges
takes as long as it computes.

    python tests/benchmarks/bench_overlap.py [--stretch 20] [--only "tp=2"] [--dry]
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from common import Workload, load, publish, table
from torch.fx import GraphModule

from autopar.adapters.copying.fake import skeleton_of
from autopar.compile.model import compile_model
from autopar.cost.flops import PRODUCT, kind_of, node_seconds
from autopar.cost.hardware import Links, device_of
from autopar.cost.traffic import communication
from autopar.ir.mesh import Mesh
from autopar.models import hf as hf  # knows transformers models
from autopar.options import Options
from autopar.passes.step.schedule_collectives import ScheduleCollectives
from autopar.rewrite.compilation import Compilation
from autopar.runtime.exec.executor import Executor
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from autopar.steps.graphs import Compiled
from autopar.steps.of_rank import backwards
from tests.support.overlap_bounds import least_seconds
from tests.support.ranks import close_pools, run_ranks
from tests.support.slow_links import SlowMesh

WORK = Workload(hidden=512, layers=2, inner=1536, heads=8, vocab=512, batch=8, length=128)
LATENCY = 1e-5  # seconds of a transfer


@dataclass(frozen=True)
class Case:
    """A mesh and its options."""

    mesh: Mesh
    options: Options

    @property
    def axis(self) -> str:
        return next(iter(self.mesh.sizes))


SEQUENCE = Options(target_hardware="CPU", sequence_parallel=True)
CASES: dict[str, Case] = {
    "tp=2, sequence parallel": Case(Mesh.of(tp=2), SEQUENCE),
    "tp=4, sequence parallel": Case(Mesh.of(tp=4), SEQUENCE),
    "tp=2": Case(Mesh.of(tp=2), replace(SEQUENCE, sequence_parallel=False)),
    "tp=4": Case(Mesh.of(tp=4), replace(SEQUENCE, sequence_parallel=False)),
    "dp=2": Case(Mesh.of(dp=2), Options(target_hardware="CPU")),
    "dp=2, zero=3": Case(Mesh.of(dp=2), Options(target_hardware="CPU", zero=3)),
    "dp=4, zero=3": Case(Mesh.of(dp=4), Options(target_hardware="CPU", zero=3)),
}


def compile_case(case: Case, overlap: bool = True) -> Compiled:
    """With the links that the case asks for. Without ``overlap``, transfers start and end as they come in the graph."""

    def made(options: Options) -> Compiled:
        work = replace(WORK, batch=WORK.batch * case.mesh.size("dp"))
        return compile_model(skeleton_of(work.model()), work.tokens(), case.mesh, options, outputs=())

    def as_it_is(self: ScheduleCollectives, gm: GraphModule, ctx: Compilation) -> GraphModule:
        return gm

    options, over_tp = case.options, "tp" in case.mesh.sizes
    plain = replace(options, async_tp=False) if over_tp else options
    options = options if overlap else plain
    with nullcontext() if overlap else patch.object(ScheduleCollectives, "apply", as_it_is):
        first = made(plain)
        return made(replace(options, topology=f"{case.axis}=switch:{rate(first, case):.0f}:{LATENCY}"))


def rate(made: Compiled, case: Case) -> float:
    """Bytes per second at which the exchanges of a graph take as long as what may be beside them: on tp the products
    of the forward, on dp the backward."""
    graph = made.stage.forward.graph if case.axis == "tp" else backwards(made.stage)[0].graph
    device = device_of(case.options)
    beside = [node for node in graph.graph.nodes if case.axis != "tp" or kind_of(node) == PRODUCT]
    seconds = sum(node_seconds(node, device) for node in beside)
    return sum(moved.bytes for moved in communication(graph, case.mesh).values()) / seconds


MADE: dict[tuple[str, bool], Compiled] = {}  # inherited by the ranks


def step(which: tuple[str, bool], slower: float) -> tuple[float, float, float, float]:
    """(seconds of a step, of its kernels, of its transfers, seconds that kernels waited for transfers) of a rank."""
    made = MADE[which]
    groups = Groups(init_mesh("cpu", 60.0, **CASES[which[0]].mesh.sizes))
    with SlowMesh(groups, made.plan.options, slower, sleep=slower > 1) as slow:
        executor = Executor(made, groups)
        values = executor_values(made, groups)
        executor.run_step(values)
        dist.barrier()
        slow.reset()
        executor.run_step(values)
    found = slow.seconds, slow.computed, sum(slow.moved.values()), sum(slow.exposed.values())
    return tuple(x / slower for x in found)  # type: ignore[return-value]


def least(made: Compiled) -> float:
    """Seconds that a step takes in any order of its calls."""
    device, links = device_of(made.plan.options), Links.of(made.plan.options, made.plan.mesh)
    return sum(least_seconds(part.graph, device, links) for part in (made.stage.forward, *backwards(made.stage)))


def executor_values(made: Compiled, groups: Groups) -> dict[str, torch.Tensor]:
    """Parameters of the right shapes, a batch, all of this rank."""
    torch.manual_seed(0)
    values: dict[str, Any] = dict(made.local.meta.get("constants", {}))
    for node in (n for n in made.local.graph.nodes if n.op == "placeholder"):
        spec = next(s for s in made.signature.inputs if s.node == node.name)
        x = node.meta["val"]
        if spec.kind in ("parameter", "buffer"):
            values[spec.name] = torch.rand(tuple(x.shape), dtype=x.dtype) / 50
        elif spec.name not in values:
            values[spec.name] = torch.randint(0, 8, tuple(x.shape)) if x.dim() else torch.tensor(0)
    return values


def main() -> None:
    """Print the table, write it to docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stretch", type=float, default=1.0, help="above 1: in real time, slower by that")
    parser.add_argument("--only", default="")
    parser.add_argument("--dry", action="store_true", help="the page is left alone")
    chosen = parser.parse_args()
    before, rows = load(), []
    for name, case in CASES.items():
        if chosen.only and chosen.only != name:
            continue
        MADE[name, True], MADE[name, False] = compile_case(case), compile_case(case, overlap=False)
        close_pools()
        ranks = case.mesh.world_size
        plain, _, _, _ = max(run_ranks(ranks, step, (name, False), chosen.stretch, timeout=300.0))
        seconds, computed, moved, exposed = max(run_ranks(ranks, step, (name, True), chosen.stretch, timeout=300.0))
        cells = [f"{x * 1e3:.0f}" for x in (plain, seconds, computed, moved, exposed)]
        could = moved - max(least(MADE[name, True]) - computed, 0.0)
        shares = 1 - seconds / plain, 1 - exposed / moved, (moved - exposed) / could
        rows.append([name, *cells, *(f"{share:.0%}" for share in shares)])
        print(rows[-1], flush=True)
    head = [
        "",
        "without overlap, ms",
        "step",
        "its kernels",
        "its transfers",
        "waited for",
        "shorter by",
        "hidden",
        "of what can be",
    ]
    text = f"{before} before, {load().split(' on ')[0]} after.\n\n{table(head, rows)}"
    print(text) if chosen.dry else publish("overlap", text)


if __name__ == "__main__":
    main()

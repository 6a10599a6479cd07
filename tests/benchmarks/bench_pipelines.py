"""Pipelines against torch.distributed.pipelining with stages written by hand, on 2 and 4 ranks: step time, bytes over
each boundary, memory, and what an action costs besides its computation.

Every side is checked first: its loss and every gradient against one process. Then all schedules of both sides take
turns, so that a busy moment of the machine meets each.

    python tests/benchmarks/bench_pipelines.py [--rounds 4] [--ranks 2,4] [--sizes compute-bound,overhead-bound]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pipelines
import torch
import torch.distributed as dist
from common import Times, Workload, interleaved, load, publish, ratio, table
from meter import Meter
from pipelines import Case, Side

from autopar.steps.graphs import Compiled

COMPUTE, OVERHEAD = "compute-bound", "overhead-bound"
SIZES = {
    COMPUTE: Workload(hidden=192, inner=512, heads=4, vocab=1024, batch=8, length=64),
    OVERHEAD: Workload(hidden=64, inner=128, heads=4, vocab=256, batch=8, length=16),
}
LOSS_LIMIT, GRADIENT_LIMIT = 1e-5, 1e-4  # float32, relative to the largest entry
WATCHED = 5  # steps
COMPILED: dict[Case, Compiled] = {}  # the ranks are forked from this process and inherit it


@dataclass
class Outcome:
    """What one rank found about one side. errors: of the loss (None: not known here), of the gradients. overhead:
    microseconds per action. kept: most bytes that F and B kept (ours). peak: most live bytes besides parameters."""

    loss_error: float | None = None
    gradient_error: float = 0.0
    sent: Counter[tuple[int, int]] = field(default_factory=Counter)
    overhead: float = 0.0
    actions: int = 0
    kept: int = 0
    peak: int = 0
    times: Times = field(default_factory=Times)


Found = dict[tuple[str, str], Outcome]  # (schedule, side)


def main() -> None:
    """Run the ranks, print the tables, write them to docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--ranks", default="2,4", help="another choice leaves the page alone")
    parser.add_argument("--sizes", default=",".join(SIZES), help="likewise")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    before = load()
    rows, costs = [], []
    for ranks in map(int, chosen.ranks.split(",")):
        for size in chosen.sizes.split(","):
            cases = [Case(SIZES[size], ranks, chunks) for chunks in (1, 2)]
            small = size == OVERHEAD
            found = _on_ranks(cases, chosen.rounds * (3 if small else 1), small)
            rows += _rows(size, cases, found)
            costs += _costs(cases, found) if small else []
    text = f"{chosen.rounds} rounds; {before} before, {load().split(' on ')[0]} after.\n\n{_tables(rows, costs)}"
    whole = chosen.ranks == parser.get_default("ranks") and chosen.sizes == parser.get_default("sizes")
    publish("pipelines", text) if whole else print(text)


def _on_ranks(cases: list[Case], rounds: int, small: bool) -> list[Found]:
    """What each rank found."""
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from tests.support.ranks import close_pools, run_ranks

    COMPILED.update({case: pipelines.compile_case(case) for case in cases})
    gc.collect()
    gc.freeze()  # else each rank's collector copies what it has inherited
    found = run_ranks(cases[0].ranks, measure, cases, rounds, small, timeout=200)
    gc.unfreeze()
    close_pools()
    COMPILED.clear()
    return found


def measure(cases: list[Case], rounds: int, small: bool) -> Found:
    """On each rank: prepare, check, measure (overhead of a small model, memory of another), time."""
    warnings.filterwarnings("ignore")
    whole, gradients = pipelines.reference(cases[0].work)
    found: Found = {}
    steps: dict[tuple[str, str], Any] = {}
    for case in cases:
        for name in case.schedules():
            sides = {"autopar": pipelines.ours(case, COMPILED[case], name), "torch": pipelines.theirs(case, name)}
            for side, runner in sides.items():
                found[name, side] = _checked(f"{name} of {side}", runner, whole, gradients)
                found[name, side].sent, found[name, side].actions = runner.count(), runner.actions
                (_overhead if small else _memory)(found[name, side], runner)
                steps[name, side] = runner.step
    for key, times in interleaved(steps, rounds).items():  # type: ignore[arg-type]
        found[key].times = times  # type: ignore[index]
    return found


def _checked(name: str, runner: Side, whole: float, gradients: Any) -> Outcome:
    loss, found = runner.step(), runner.gradients()
    errors = [float((g - gradients[n]).abs().max() / gradients[n].abs().max()) for n, g in found.items()]
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, sorted(found))
    missing = set(gradients) - {n for names in held for n in names}
    assert not missing, f"{name}: no rank has a gradient of {sorted(missing)[:4]}"
    out = Outcome(None if loss is None else abs(float(loss) - whole) / whole, max(errors))
    assert (out.loss_error or 0.0) < LOSS_LIMIT and out.gradient_error < GRADIENT_LIMIT, f"{name}: {out}"
    return out


def _overhead(out: Outcome, runner: Side) -> None:
    seconds = []
    with runner.watched() as watch:
        for _ in range(WATCHED):
            dist.barrier()
            runner.clear()
            watch.run(runner.run)
            seconds.append(watch.overhead)
    out.overhead = min(seconds) / out.actions * 1e6


def _memory(out: Outcome, runner: Side) -> None:
    out.kept = runner.kept()
    runner.clear()
    gc.collect()
    with SendMeter(alive=runner.held) as meter:
        held = meter.live()
        runner.run()
    assert meter.sent["send"] == out.sent.total(), f"sent {out.sent}, the dispatcher says {meter.sent}"
    out.peak = meter.peak - held


class SendMeter(Meter):
    """Counts sends, too."""

    def _count(self, name: str, args: Any, out: Any) -> None:
        if name == "c10d::send":
            self.sent["send"] += sum(x.nbytes for x in args[0])
        elif name != "c10d::recv_":
            super()._count(name, args, out)


# --- tables -------------------------------------------------------------------------------------------


def _rows(size: str, cases: list[Case], found: list[Found]) -> list[list[str]]:
    rows = []
    for case in cases:
        for name in case.schedules():
            a, b = found[0][name, "autopar"].times, found[0][name, "torch"].times
            cells = [f"{min(a.wall) * 1e3:.1f}", *(f"{x:.2f}" for x in ratio(a, b))]
            for side in ("autopar", "torch"):
                each = {bytes_ for rank in found for bytes_ in rank[name, side].sent.values()}
                cells.append("/".join(f"{x / 1e3:.1f}" for x in sorted(each)))
            cells.append(f"{case.boundary / 1e3:.1f}")
            kept = max(r[name, "autopar"].kept for r in found)
            peaks = [max(r[name, side].peak for r in found) for side in ("autopar", "torch")]
            cells += [f"{x / 1e6:.1f}" if x else "" for x in (kept, *peaks)]
            cells += [f"{max(r[name, side].gradient_error for r in found):.0e}" for side in ("autopar", "torch")]
            rows.append([size, str(case.ranks), name, *cells])
    return rows


def _costs(cases: list[Case], found: list[Found]) -> list[list[str]]:
    """What an action costs besides its computation, of the rank where it costs most."""
    rows = []
    for case in cases:
        for name in case.schedules():
            cells = []
            for side in ("autopar", "torch"):
                cost = max(rank[name, side].overhead for rank in found)
                actions = max(rank[name, side].actions for rank in found)
                cells += [f"{cost:.0f}", f"{cost * actions / case.microbatches:.0f}"]
            rows.append([str(case.ranks), name, str(actions), *cells])
    return rows


def _tables(rows: list[list[str]], costs: list[list[str]]) -> str:
    head = ["", "ranks", "schedule", "ms, min", "to torch: min", "median", "processor"]
    head += ["kB per boundary", "torch", "formula", "MB kept", "peak MB", "torch", "gradient error", "torch"]
    second = ["ranks", "schedule", "actions", "us per action", "per microbatch", "torch: us per action"]
    second += ["per microbatch"]
    middle = statistics.median(float(row[4]) for row in rows)
    cost_table = table(second, costs) if costs else ""
    return f"{table(head, rows)}\n\n{cost_table}\n\nMedian of the ratios of the fastest rounds: {middle:.2f}."


if __name__ == "__main__":
    main()

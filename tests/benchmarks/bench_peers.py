"""Ours against what eager PyTorch and transformers offer, on two ranks: step time, bytes sent, peak memory.

Every runner is checked first: its loss and every gradient against one process. Then all of them take turns, so that a
busy moment of the machine meets each.

    python tests/benchmarks/bench_peers.py [--rounds 5] [--only "DDP;autopar dp"] [--small]
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import peers
import torch
import torch.distributed as dist
from common import SMALL, Times, Workload, interleaved, load, publish, ratio, slowest, table
from meter import Meter

import autopar

Make = Callable[[Workload], peers.Runner]
MAKE: dict[str, Make] = {
    "DDP": peers.ddp,
    "autopar dp": partial(peers.ours, axis="dp"),
    "FSDP2": peers.fsdp2,
    "FSDP2, no reshard": peers.fsdp2_no_reshard,
    "autopar dp zero=3": partial(peers.ours, axis="dp", zero=3),
    "parallelize_module": peers.tensor_parallel,
    "transformers tp_plan": peers.transformers_tp,
    "parallelize_module, sequence + loss parallel": peers.sequence_and_loss_parallel,
    "autopar tp": partial(peers.ours, axis="tp"),
    "autopar tp, sequence parallel": partial(peers.ours, axis="tp", sequence_parallel=True),
}
OPPONENTS = {
    "autopar dp": ("DDP",),
    "autopar dp zero=3": ("FSDP2", "FSDP2, no reshard"),
    "autopar tp": ("parallelize_module", "transformers tp_plan"),
    "autopar tp, sequence parallel": ("parallelize_module, sequence + loss parallel",),
}
LIMITS = 1e-5, 1e-4  # of the loss and of gradients in float32, relative to the largest entry


@dataclass
class Outcome:
    """What was found about one runner: errors relative to one process, bytes sent by kind, calls, and times."""

    loss_error: float = 0.0
    gradient_error: float = 0.0
    sent: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    times: Times = field(default_factory=Times)


def main() -> None:
    """Run the ranks, print the table, write it to docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="names, separated by semicolons; the page is then left alone")
    parser.add_argument("--small", action="store_true", help="a small model, to try the harness")
    chosen = parser.parse_args()
    workload = SMALL if chosen.small else Workload()
    names = chosen.only.split(";") if chosen.only else list(MAKE)
    before = load()
    arguments = (workload, names, chosen.rounds)
    found: dict[str, Outcome] = autopar.launch(_work, nproc=2, args=arguments, timeout=300, device="cpu")[0]
    text = report(found, chosen.rounds, before, OPPONENTS)
    print(text) if chosen.only or chosen.small else publish("peers", text)


def _work(workload: Workload, names: list[str], rounds: int) -> dict[str, Outcome]:
    return measured(MAKE, workload, names, rounds, LIMITS)


def measured(
    make: Mapping[str, Make], workload: Workload, names: list[str], rounds: int, limits: tuple[float, float]
) -> dict[str, Outcome]:
    """On each rank: prepare, check, measure, time."""
    torch.set_num_threads(1)
    autopar.init_mesh(dp=int(os.environ["WORLD_SIZE"]), timeout=300)
    reference = peers.single(workload)
    whole = float(reference.step())
    gradients = {n: g.clone() for n, g in reference.gradients().items()}
    outcomes: dict[str, Outcome] = {}
    runners: dict[str, peers.Runner] = {}
    for name in names:
        runner = runners[name] = make[name](workload)
        outcomes[name] = _checked(name, runner, whole, gradients, limits)
        outcomes[name].sent, outcomes[name].calls, outcomes[name].peak = _metered(name, runner)
        runner.model.zero_grad(set_to_none=True)
    outcomes["one process"] = Outcome(peak=_metered("one process", reference)[2])
    reference.model.zero_grad(set_to_none=True)
    steps: dict[str, Any] = {"one process": reference.step if dist.get_rank() == 0 else (lambda: None)}
    steps |= {name: runner.step for name, runner in runners.items()}
    for name, times in interleaved(steps, rounds).items():
        outcomes[name].times = times
    return outcomes


def _checked(
    name: str, runner: peers.Runner, whole: float, gradients: dict[str, torch.Tensor], limits: tuple[float, float]
) -> Outcome:
    loss = runner.step().clone()
    if runner.mean_loss:
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    found = runner.gradients()
    odd = sorted(set(found) ^ set(gradients))
    assert not odd, f"{name}: gradients of {odd[:4]} are missing or too many"
    errors = [float((found[n] - g).abs().max() / g.abs().max()) for n, g in gradients.items()]
    out = Outcome(abs(float(loss) - whole) / whole, slowest(max(errors)))
    assert out.loss_error < limits[0] and out.gradient_error < limits[1], f"{name}: {out}"
    return out


def _metered(name: str, runner: peers.Runner) -> tuple[dict[str, int], dict[str, int], int]:
    """Bytes, calls, and peak memory of one step; ours must agree with its own ledger."""
    runner.model.zero_grad(set_to_none=True)
    gc.collect()
    ledger = _ledger(runner)
    with Meter(alive=[*runner.model.parameters(), *runner.model.buffers()]) as meter:
        runner.step()
    sent = dict(meter.sent)
    if ledger is not None:
        mine = {kind: size - ledger.get(kind, 0) for kind, size in (_ledger(runner) or {}).items()}
        assert mine == sent, f"{name}: its ledger says {mine}, the dispatcher {sent}"
    return sent, dict(meter.calls), int(slowest(meter.peak))


def _ledger(runner: peers.Runner) -> dict[str, int] | None:
    if not isinstance(runner.model, autopar.ParallelModule):
        return None
    out: dict[str, int] = {}
    for (_, kind), traffic in runner.model.traffic().items():
        out[kind] = out.get(kind, 0) + traffic.bytes
    return out


def report(found: dict[str, Outcome], rounds: int, before: str, opponents: Mapping[str, Sequence[str]]) -> str:
    """The table; ``opponents``: our rows -> the peers that each is compared with."""
    reference = found["one process"]
    rows = [_row(name, outcome, reference.times, found, opponents) for name, outcome in found.items()]
    rows.sort(key=lambda row: row[0] != "one process")
    head = ["", "s, min", "to one process: min", "median", "processor", "to the best peer: min", "median", "processor"]
    head += ["MB sent", "calls", "peak MB", "gradient error"]
    return f"{rounds} rounds; {before} before, {load().split(' on ')[0]} after.\n\n{table(head, rows)}"


def _row(
    name: str,
    outcome: Outcome,
    reference: Times,
    found: dict[str, Outcome],
    opponents: Mapping[str, Sequence[str]],
) -> list[str]:
    against = [ratio(outcome.times, found[peer].times) for peer in opponents.get(name, ()) if peer in found]
    best = [f"{max(column):.2f}" for column in zip(*against)] if against else [""] * 3
    kinds = ", ".join(f"{kind} {outcome.calls[kind]}" for kind in sorted(outcome.calls))
    return [
        f"**{name}**" if name in opponents else name,
        f"{min(outcome.times.wall):.2f}",
        *(f"{x:.2f}" for x in ratio(outcome.times, reference)),
        *best,
        f"{sum(outcome.sent.values()) / 1e6:.1f}",
        kinds,
        f"{outcome.peak / 1e6:.0f}",
        f"{outcome.gradient_error:.0e}",
    ]


if __name__ == "__main__":
    main()

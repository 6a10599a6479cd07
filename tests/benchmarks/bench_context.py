"""Context-parallel attention against torch's own and that of public packages, on 2 and 4 ranks: time of forward and of
forward + backward, bytes sent, memory.

Every side is checked first: its output and its gradients against one process. Then all sides take turns within one set
of processes, so that a busy moment of the machine meets each.

    python tests/benchmarks/bench_context.py [--rounds 3] [--quick] [--only 0,2] [--times 2] [--peers FOLDER]

Packages to compare with are used where they can be imported; --peers names a folder that has them:

    pip install --no-deps --target FOLDER ring-flash-attn yunchang
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import context
import torch
import torch.distributed as dist
from common import Times, interleaved, load, publish, ratio, slowest, table
from context import AXIS, Case, Missing, Result, Side
from context_peers import PEERS
from meter import Meter
from torch import Tensor

from autopar.runtime.mesh.process_groups import Groups, init_mesh

CASES = [
    Case(2, 4096, 8, 8),
    Case(2, 4096, 8, 2, torch.bfloat16),
    Case(4, 4096, 8, 2),
    Case(4, 4096, 8, 8, torch.bfloat16),
    Case(4, 2048, 8, 8, causal=False),
]
QUICK = [Case(2, 2048, 8, 2), Case(4, 2048, 8, 8, torch.bfloat16), Case(4, 1024, 8, 8, causal=False)]
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # largest difference relative to the largest entry
WHOLE = "one process"
RINGS = ("torch allgather", "torch alltoall", "ring-flash-attn ring")
OPPONENTS = {  # the same kind; where none of it runs, all peers
    "autopar all_gather": ("torch allgather", "ring-flash-attn llama3"),
    "autopar ulysses": ("yunchang ulysses",),
    "autopar hybrid": ("yunchang usp",),
}
PARTS = ("forward", "both")
REFERENCES: dict[Case, Result] = {}  # the ranks are forked from this process and inherit it


@dataclass
class Outcome:
    """What was found about one side. missing: why it was not run. sent: bytes in the forward, and in forward and
    backward, of each rank. peak: most live bytes besides inputs, on the rank with most. Times: of the slowest rank."""

    missing: str = ""
    error: float = 0.0
    sent: list[tuple[int, int]] = field(default_factory=list)
    peak: int = 0
    forward: Times = field(default_factory=Times)
    both: Times = field(default_factory=Times)


Found = dict[str, Outcome]


def main() -> None:
    """Run the ranks, print the tables, write them to docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small sizes; leaves the page alone")
    parser.add_argument("--times", type=int, default=1, help="sequences so many times as long; likewise")
    parser.add_argument("--only", default="", help="numbers of cases; likewise")
    parser.add_argument("--peers", default="", help="a folder with packages to compare with")
    chosen = parser.parse_args()
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    sys.path += [chosen.peers] if chosen.peers else []
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    before, cases = load(), QUICK if chosen.quick else CASES
    if chosen.only:
        cases = [cases[int(i)] for i in chosen.only.split(",")]
    cases = [replace(case, length=case.length * chosen.times) for case in cases]
    found = {case: _on_ranks(case, chosen.rounds) for case in cases}
    tables = "\n\n".join(_table(case, outcomes) for case, outcomes in found.items())
    text = f"{chosen.rounds} rounds; {before} before, {load().split(' on ')[0]} after.\n\n{tables}"
    print(text) if chosen.quick or chosen.only or chosen.times > 1 else publish("context", text)


def _on_ranks(case: Case, rounds: int) -> Found:
    from tests.support.ranks import close_pools, run_ranks

    REFERENCES[case] = context.reference(case)
    found: list[Found] = run_ranks(case.ranks, measure, case, rounds, timeout=600)
    close_pools()
    REFERENCES.clear()
    for name, out in found[0].items():
        out.sent = [pair for rank in found for pair in rank[name].sent]
        out.peak = max(rank[name].peak for rank in found)
    return found[0]


def measure(case: Case, rounds: int) -> Found:
    """On each rank: prepare, check, measure, time."""
    warnings.filterwarnings("ignore")
    groups = Groups(init_mesh(**{AXIS: case.ranks}))
    makers: dict[str, Callable[[Case, Groups], Side]] = {**PEERS, **context.algorithms()}
    found, sides = {WHOLE: Outcome()}, {}
    for name, make in makers.items():
        try:
            sides[name] = make(case, groups)
        except Missing as why:
            found[name] = Outcome(missing=str(why))
            continue
        found[name] = _checked(name, case, sides[name])
        found[name].sent, found[name].peak = _metered(name, sides[name])
    whole = context.one_process(case)
    alone = dist.get_rank() == 0
    steps: dict[str, Callable[[], Any]] = {}
    for name, side in {WHOLE: whole, **sides}.items():
        idle = name == WHOLE and not alone
        steps[f"{name} forward"] = _nothing if idle else side.forward
        steps[f"{name} both"] = _nothing if idle else side.both
    times = interleaved(steps, rounds, warmup=0)  # checks were the warm-up
    for name in [WHOLE, *sides]:
        found[name].forward, found[name].both = times[f"{name} forward"], times[f"{name} both"]
    return found


def _nothing() -> None:
    pass


def _checked(name: str, case: Case, side: Side) -> Outcome:
    errors = []
    for got, whole in zip(side.both(), REFERENCES[case]):
        want = whole.index_select(2, side.positions)
        assert got.shape == want.shape and got.dtype == case.dtype, f"{name}: {got.shape} {got.dtype}, not {want.shape}"
        errors.append(float((got.float() - want).abs().max() / whole.abs().max()))
    error = slowest(max(errors))
    assert error < LIMITS[case.dtype], f"{name}: errors of out and gradients {errors}"
    return Outcome(error=error)


def _metered(name: str, side: Side) -> tuple[list[tuple[int, int]], int]:
    """Bytes sent by this rank, in the forward and in both, and its peak of memory in both."""
    sent = []
    for step in (side.forward, side.both):
        gc.collect()
        before = side.ledger() if side.ledger else 0
        with TransferMeter(alive=side.held) as meter:
            held = meter.live()
            step()
        sent.append(sum(meter.sent.values()))
        if side.ledger:
            assert side.ledger() - before == sent[-1], f"{name}: ledger {side.ledger() - before}, dispatcher {sent[-1]}"
    return [(sent[0], sent[1])], meter.peak - held


class TransferMeter(Meter):
    """Knows sends, exchanges in unequal parts, and groups that are a part of the world."""

    def _count(self, name: str, args: Any, out: Any) -> None:
        if name == "c10d::send":
            self.sent["send"] += sum(x.nbytes for x in args[0])
        elif name in ("_c10d_functional::all_to_all_single", "c10d::alltoall_base_"):
            x, splits, group = (args[0], args[2], args[3]) if "functional" in name else (args[1], args[4], args[2])
            self._exchange(x, splits, _group(group))
        elif name != "c10d::recv_":
            super()._count(name, args, out)

    def _exchange(self, x: Tensor, splits: list[int], group: dist.ProcessGroup) -> None:
        parts = list(splits) or [x.shape[0] // group.size()] * group.size()
        parts[group.rank()] = 0
        self.sent["all_to_all"] += sum(parts) * x.nbytes // x.shape[0]


def _group(named: Any) -> dist.ProcessGroup:
    if isinstance(named, str):
        return torch._C._distributed_c10d._resolve_process_group(named)
    return dist.ProcessGroup.unbox(named)


# --- tables -------------------------------------------------------------------------------------------


def _table(case: Case, found: Found) -> str:
    head = ["", "forward ms", "to one process", "to the best of its kind: min", "median", "processor"]
    head += ["both ms", "to one process", "to the best of its kind: min", "median", "processor"]
    head += ["MB sent forward", "both", "peak MB", "error"]
    ran = {name: out for name, out in found.items() if not out.missing}
    rows = [_row(name, ran) for name in ran]
    fastest = "; ".join(f"{part} {_fastest(ran, part)}" for part in PARTS)
    left_out = [f"{name} ({out.missing})" for name, out in found.items() if out.missing]
    lines = [f"{case}", table(head, rows), f"Fastest of ours to fastest peer, processor time: {fastest}."]
    return "\n\n".join([*lines, *([f"Not run: {'; '.join(left_out)}."] if left_out else [])])


def _row(name: str, ran: Found) -> list[str]:
    out = ran[name]
    ours = name not in PEERS and name != WHOLE
    cells = [f"**{name}**" if ours else name]
    opponents = [n for n in OPPONENTS.get(name, RINGS) if n in ran] or [n for n in PEERS if n in ran]
    for part in PARTS:
        times: Times = getattr(out, part)
        cells += [f"{min(times.wall) * 1e3:.0f}", f"{ratio(times, getattr(ran[WHOLE], part))[0]:.2f}"]
        against = [ratio(times, getattr(ran[peer], part)) for peer in opponents]
        cells += [f"{max(column):.2f}" for column in zip(*against)] if ours else [""] * 3
    cells += [_megabytes(column) for column in zip(*out.sent)] or ["", ""]
    return [*cells, f"{out.peak / 1e6:.1f}" if out.peak else "", f"{out.error:.0e}" if out.sent else ""]


def _megabytes(sent: tuple[int, ...]) -> str:
    """The mean over the ranks, and the most if that is another."""
    mean, most = f"{sum(sent) / len(sent) / 1e6:.1f}", f"{max(sent) / 1e6:.1f}"
    return mean if mean == most else f"{mean} ({most})"


def _fastest(ran: Found, part: str) -> str:
    """Of the algorithms and of the peers, the one that takes least processor time on its slowest rank."""
    least = {name: min(getattr(out, part).cpu) for name, out in ran.items() if name != WHOLE}
    ours, theirs = (min((n for n in least if (n in PEERS) is peer), key=lambda n: least[n]) for peer in (False, True))
    return f"{least[ours] / least[theirs]:.2f} ({ours.removeprefix('autopar ')}, {theirs})"


if __name__ == "__main__":
    main()

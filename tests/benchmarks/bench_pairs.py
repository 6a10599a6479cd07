"""Pairs of attention and expert nodes: against one all_to_all over both roles, processor time of an attention rank, and
ping-pong with kernels that sleep and a wire that delays, against the formula of `autopar.cost.ping_pong`.

    python tests/benchmarks/bench_pairs.py [--rounds 300] [--only exchange,processor,ping_pong]
"""

from __future__ import annotations

import argparse
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from common import load, publish, table
from torch import Tensor

import autopar
from autopar.adapters.distributed import default_store, root_store
from autopar.cost.ping_pong import Interval, LayerTimes, simulated, step_seconds
from autopar.report.disaggregation_summary import drawn
from autopar.runtime.comm.pairs import AnsweringPairs, AskingPairs
from autopar.runtime.comm.rows import Memory, RowFormat
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.mesh.roles import Roles, pair_group

SIZES = {"32 KB": 4, "256 KB": 32}  # per pair: tokens of 8 KB
HIDDEN = 2048
LAYERS, COMPUTE = 6, 0.060  # of ping-pong; seconds of attention, and of experts
WIRES = (0.0, 0.024)  # seconds in one direction
MOST = {"exchange": 0.8, "processor": 0.5, "ping_pong": 0.1}


def started(nodes: tuple[int, int], hidden: int = HIDDEN) -> tuple[Roles, Groups, RowFormat]:
    roles = autopar.init_roles("cpu", 60, attention={"dp": nodes[0]}, experts={"ep": nodes[1]})
    return roles, Groups(roles.mesh), RowFormat(nodes[1], nodes[1], hidden, torch.float32, torch.float32)


def tokens_of(rows: RowFormat, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every token has chosen an expert on every node."""
    experts = torch.arange(rows.num_experts).expand(count, -1).contiguous()
    return torch.randn(count, rows.hidden), experts, torch.rand(count, rows.top_k)


def same(layer: int, x: Tensor, expert: Tensor | None, weights: Tensor | None) -> Tensor:
    return x


# --- an exchange -----------------------------------------------------------------------------------------------


def exchange(rounds: int) -> dict[str, tuple[float, float]]:
    """Size -> best seconds from routing to rows that experts can compute with: by pairs with their headers, and by one
    all_to_all_single of the same rows, whose numbers are known here. They take turns."""
    roles, groups, rows = started((2, 2))
    everyone = pair_group(roles, range(4), "all", root_store(default_store()))
    found: dict[str, tuple[float, float]] = {}
    end = 0.0
    asking = AskingPairs(roles, groups, [rows]) if roles.role == "attention" else None
    answering = AnsweringPairs(roles, groups, [rows]) if roles.role == "experts" else None

    def note(layer: int, x: Tensor, *_: Any) -> Tensor:
        nonlocal end
        end = time.perf_counter()
        return x

    for name, count in SIZES.items():
        given, best = tokens_of(rows, count), {"pairs": 1e9, "all_to_all": 1e9}
        sent, received = ([0, 0, count, count], [0] * 4) if asking else ([0] * 4, [count, count, 0, 0])
        sizes = [[n * rows.row_bytes for n in counts] for counts in (received, sent)]
        out, ready = (Memory(sum(of_ranks), groups.device) for of_ranks in sizes)
        for _ in range(rounds):
            dist.all_to_all_single(torch.empty(4), torch.zeros(4), group=everyone)  # all are here
            begin = end = time.perf_counter()
            if asking:
                asked = asking.start(0, *given)
                end = time.perf_counter()
                asking.finish(asked)
                asking.step += 1
            elif answering:
                answering._run_step(note)
            best["pairs"] = min(best["pairs"], end - begin)
            dist.all_to_all_single(torch.empty(4), torch.zeros(4), group=everyone)
            begin = time.perf_counter()
            if asking:
                parts, at = rows.parts_of(*given), 0
                for places, n in asking._chosen(0, given[1], count):
                    rows.write(ready, at, parts, places)
                    at += n * rows.row_bytes
            dist.all_to_all_single(out.bytes, ready.bytes, *sizes, group=everyone)
            if answering:
                pieces = [(out, k * count * rows.row_bytes, count) for k in range(2)]
                rows.read(rows.join(pieces, groups.device), 0, 2 * count)
            best["all_to_all"] = min(best["all_to_all"], time.perf_counter() - begin)
        found[name] = best["pairs"], best["all_to_all"]
    return found


# --- processor time --------------------------------------------------------------------------------------------


def processor(rounds: int) -> float:
    """Seconds of the processor, all threads, of an attention rank per layer and microbatch, with two expert nodes."""
    roles, groups, rows = started((1, 2), 512)
    if roles.role == "experts":
        AnsweringPairs(roles, groups, [rows]).serve(same)
        return 0.0
    pairs, (x, experts, weights), best = AskingPairs(roles, groups, [rows]), tokens_of(rows, 16), 1e9
    given = x, torch.randint(rows.num_experts, experts.shape), weights  # of one node, or of both
    for _ in range(max(rounds // 10, 3)):
        begin = time.process_time()
        for _ in range(100):
            pairs.finish(pairs.start(0, *given))
            pairs.resume(pairs.step + 1, 0)
        best = min(best, (time.process_time() - begin) / 100)
    pairs.end()
    return best


# --- ping-pong -------------------------------------------------------------------------------------------------


class Wire:
    """A process group whose messages leave so many seconds later."""

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        self._group, self._seconds = group, seconds
        self._waiting: queue.SimpleQueue[tuple[float, Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            due, send = self._waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            send()

    def recv(self, *given: Any) -> Any:
        return self._group.recv(*given)

    def send(self, *given: Any) -> Sent:
        sent = Sent(lambda: self._group.send(*given))
        self._waiting.put((time.monotonic() + self._seconds, sent.send))
        return sent


class Sent:
    """A message on a `Wire`."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start, self._left, self._work = start, threading.Event(), None

    def send(self) -> None:
        self._work = self._start()
        self._left.set()

    def wait(self) -> None:
        self._left.wait()
        self._work.wait()  # type: ignore[attr-defined]


def ping_pong(wire: float, microbatches: int, steps: int = 3) -> tuple[float, list[Interval]]:
    """Best seconds of a step; when this rank computed what in the last one."""
    roles, groups, rows = started((1, 1), 64)
    delayed = Wire(roles.pairs[0].headers, wire)
    pair = dataclasses.replace(roles.pairs[0], headers=delayed, rows=delayed, sums=delayed)
    object.__setattr__(roles, "pairs", (pair,))
    if roles.role == "experts":

        def answer(layer: int, x: Tensor, *_: Any) -> Tensor:
            time.sleep(COMPUTE)
            return x

        answering = AnsweringPairs(roles, groups, [rows] * LAYERS, microbatches)
        answering.serve(answer)
        return 0.0, answering.timeline
    pairs, given, best = AskingPairs(roles, groups, [rows] * LAYERS), tokens_of(rows, 8), 1e9

    def graph() -> Iterator[None]:
        for layer in range(LAYERS):
            time.sleep(COMPUTE)
            asked = pairs.start(layer, *given)
            yield
            pairs.finish(asked)

    for step in range(steps):
        begin, running = time.perf_counter(), {i: graph() for i in range(microbatches)}
        while running:
            for i, turns in list(running.items()):
                pairs.resume(step, i)
                if next(turns, turns) is turns:
                    del running[i]
        best = min(best, time.perf_counter() - begin)
    pairs.end()
    return best, pairs.timeline


def published(name: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    publish(f"pairs_{name}", f"{load()}.\n\n{table(header, rows)}")


def main() -> int:
    """Run all, write the tables to docs/benchmarks.md; the number of goals that were missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--only", default="exchange,processor,ping_pong")
    asked = parser.parse_args()
    parts, missed = asked.only.split(","), []
    if "exchange" in parts:
        ranks = autopar.launch(exchange, 4, (asked.rounds,))
        rows = []
        for size in SIZES:
            pairs, whole = (max(rank[size][i] for rank in ranks) for i in (0, 1))
            rows.append([size, f"{pairs * 1e6:.0f}", f"{whole * 1e6:.0f}", f"{pairs / whole:.2f}"])
            missed += [f"exchange of {size}: {pairs / whole:.2f}"] if pairs / whole >= MOST["exchange"] else []
        published("exchange", ["per pair", "pairs, us", "all_to_all, us", "ratio"], rows)
    if "processor" in parts:
        spent = autopar.launch(processor, 3, (asked.rounds,))[0] * 1e3
        published("processor", ["ms per layer and microbatch"], [[f"{spent:.2f}"]])
        missed += [f"processor: {spent:.2f} ms"] if spent >= MOST["processor"] else []
    if "ping_pong" in parts:
        rows = []
        for wire in WIRES:
            ranks = [autopar.launch(ping_pong, 2, (wire, m)) for m in range(1, 5)]
            times, layer = [seconds for (seconds, _), _ in ranks], LayerTimes(COMPUTE, COMPUTE, wire)
            formula = [step_seconds(layer, LAYERS, m) for m in range(1, 5)]
            for m, ((_, attention), (_, experts)) in enumerate(ranks, 1):
                print(f"wire {wire * 1e3:.0f} ms, {m} microbatches, simulated and measured")
                print(*drawn(simulated(layer, LAYERS, m)), *drawn([*attention, *experts]), sep="\n")
            gains = ["", *(f"{(m + 1) / times[m] / (m / times[m - 1]):.2f}" for m in range(1, 4))]
            for m, (measured, expected, gain) in enumerate(zip(times, formula, gains), 1):
                cells = [f"{wire * 1e3:.0f}", str(m), f"{measured * 1e3:.0f}", f"{expected * 1e3:.0f}", gain]
                rows.append(cells)
                if abs(measured / expected - 1) > MOST["ping_pong"]:
                    missed.append(f"ping-pong {cells}")
        header = ["wire, ms", "microbatches", "step, ms", "formula, ms", "tokens/s by the last one"]
        published("ping_pong", header, rows)
    for one in missed:
        print(f"missed: {one}")
    return len(missed)


if __name__ == "__main__":
    raise SystemExit(main())

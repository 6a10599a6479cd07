"""Packed documents against a dense mask: pairs that are computed, processor time and bytes, on one rank and over cp.

Eight documents of random lengths in one row. "mask" is what attention without documents does: blocks of rows with all
columns and a mask. Ranks are threads of this process, so processor time is that of all ranks together. Results of all
are compared first.

    python tests/benchmarks/bench_documents.py [--tokens 32768] [--small]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import publish
from torch import Tensor

from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.attend import KernelCall
from autopar.attention.layouts import LAYOUTS
from autopar.attention.problem import Mask, Problem
from autopar.attention.program import trace
from autopar.ops import kernels
from autopar.ops.documents import Run, documents_of
from autopar.testing import attention_ranks
from autopar.testing.attention_ranks import Case, attend_over_ranks, differentiate_over_ranks
from autopar.testing.thread_comm import ThreadComm, run

DOCUMENTS, HEADS, WIDTH, ROWS = 8, 2, 64, 512
OVER_RANKS = [
    ("ring", "contiguous", 2), ("zigzag_ring", "zigzag", 2), ("ulysses", "contiguous", 2),
    ("ring", "contiguous", 4), ("zigzag_ring", "zigzag", 4), ("token_ring", "zigzag", 4),
]  # fmt: skip


@dataclass
class Measured:
    """Pairs that kernels were called for, per head, processor seconds of forward and backward, bytes sent to others."""

    pairs: int
    seconds: float
    sent: int = 0


def lengths_of(tokens: int) -> list[int]:
    """Random lengths of the documents, the same each time."""
    seeded = torch.Generator().manual_seed(0)
    ends = torch.randperm(tokens - 1, generator=seeded)[: DOCUMENTS - 1].add(1).sort().values.tolist()
    return [b - a for a, b in zip([0, *ends], [*ends, tokens], strict=True)]


def case_of(lengths: list[int], ranks: int, layout: str, segments: bool = True) -> Case:
    tokens, blocks = sum(lengths), LAYOUTS[layout]
    problem = Problem(
        batch=1, heads=HEADS, kv_heads=HEADS, queries=tokens, keys=tokens, width=WIDTH, value_width=WIDTH,
        dtype=torch.float32, size=ranks, mask=Mask(causal=True), query_blocks=blocks, key_blocks=blocks,
        segments=segments,
    )  # fmt: skip
    case = Case.of(problem)
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    case.facts = dataclasses.replace(case.facts, segments=numbers if segments else None)
    return case


def timed(step: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    return step(), time.process_time() - start


def alone(case: Case) -> tuple[Measured, Tensor]:
    """One rank; the output."""

    def step() -> Tensor:
        out, lse = kernels.forward(case.q, case.k, case.v, case.facts)
        kernels.backward(case.grad, case.q, case.k, case.v, out, lse, case.facts, False)
        return out

    out, seconds = timed(step)
    documents = documents_of(case.facts.segments)
    blocks = documents.blocks[0] if documents else (Run(0, case.problem.queries),)
    return Measured(sum(len(b) * (len(b) + 1) // 2 for b in blocks), seconds), out


def masked(case: Case) -> tuple[Measured, Tensor]:
    """One rank, some rows at a time with all columns and their mask."""
    segments = case.facts.segments
    assert segments is not None
    plain = dataclasses.replace(case.facts, segments=None, causal=False)
    tokens = torch.arange(case.problem.keys)

    def step() -> Tensor:
        found = []
        for q, grad, rows in zip(*(x.split(ROWS, 2) for x in (case.q, case.grad)), tokens.split(ROWS), strict=True):
            seen = (segments[0, rows, None] == segments[0]) & (tokens <= rows[:, None])
            facts = dataclasses.replace(plain, mask=seen[None, None])
            out, lse = kernels.forward(q, case.k, case.v, facts)
            kernels.backward(grad, q, case.k, case.v, out, lse, facts, False)
            found.append(out)
        return torch.cat(found, 2)

    out, seconds = timed(step)
    return Measured(case.problem.queries * case.problem.keys, seconds), out


def over_ranks(name: str, case: Case) -> tuple[Measured, Tensor, list[int]]:
    """All ranks; the output, and the pairs of each rank."""
    (out, lse, comms), forward = timed(lambda: attend_over_ranks(name, case))
    (_, others), backward = timed(lambda: differentiate_over_ranks(name, case, out, lse))
    heads = case.problem.heads // (case.problem.size if name == "ulysses" else 1)

    def pairs(comm: ThreadComm) -> int:
        return sum(e.pairs * e.heads for e in comm.events if isinstance(e, KernelCall)) // heads

    each = [pairs(comm) for comm in comms]
    sent = sum(s.bytes for comm in (*comms, *others) for s in comm.sent)
    return Measured(sum(each), forward + backward, sent), out, each


def sent_without_documents(name: str, problem: Problem) -> int:
    """Bytes that all ranks send in forward and backward."""
    traces = (trace(ALGORITHMS[name], problem, way, rank) for way in (False, True) for rank in range(problem.size))
    return sum(sum(one.sent.values()) for one in traces)


def table(tokens: int) -> str:
    """The page's part."""
    lengths = lengths_of(tokens)
    exist = sum(n * (n + 1) // 2 for n in lengths)
    case = case_of(lengths, 1, "contiguous")
    alone(case)  # warm
    mask, expected = masked(case)
    triangle, _ = alone(case_of(lengths, 1, "contiguous", segments=False))
    one, out = alone(case)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    lines = [
        f"A row of {tokens:,} tokens with {DOCUMENTS} documents of {', '.join(map(str, lengths))} tokens, causal, "
        f"{HEADS} heads of {WIDTH}, float32, forward and backward. Of {tokens * tokens / 1e6:,.0f} M pairs "
        f"{exist / 1e6:,.1f} M exist.",
        "",
        "| | pairs, M | of those that exist | processor s | MB sent | MB without documents | busiest rank |",
        "|---|---|---|---|---|---|---|",
        *(_line(name, one, exist) for name, one in
          (("a mask over all pairs", mask), ("causal, no documents", triangle), ("documents", one))),
    ]  # fmt: skip
    for name, layout, ranks in OVER_RANKS:
        found, out, each = over_ranks(name, case_of(lengths, ranks, layout))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        plain = sent_without_documents(name, case_of(lengths, ranks, layout, segments=False).problem)
        sent = ["", ""] if name == "ulysses" else [f"{x / 1e6:,.1f}" for x in (found.sent, plain)]
        share = max(each) * len(each) / sum(each)
        lines.append(_line(f"{name}, {layout}, cp={ranks}", found, exist, *sent, f"{share:.2f}"))
    gain, ratio = mask.seconds / one.seconds, mask.pairs / one.pairs
    said = f"Documents take {gain:.1f} times less processor time than the mask, for {ratio:.1f} times fewer pairs."
    return "\n".join([*lines, "", said])


def _line(name: str, one: Measured, exist: int, *more: str) -> str:
    cells = (name, f"{one.pairs / 1e6:,.1f}", f"{one.pairs / exist:.3f}", f"{one.seconds:.2f}", *(more or ("",) * 3))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--small", action="store_true", help="to try the harness itself: nothing is written")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    attention_ranks.run = functools.partial(run, patience=3600.0)  # ranks compute for minutes between exchanges
    text = table(1024 if chosen.small else chosen.tokens)
    print(text) if chosen.small or chosen.tokens != 32768 else publish("packed documents", text)


if __name__ == "__main__":
    main()

"""Attention over a sequence that is sharded over ranks: its terms, and the problem that an algorithm solves.

    rows      positions of queries       columns   positions of keys and values      (global, in consecutive spans)

A rank holds some rows and some columns; an algorithm pairs all of them. It is written against a `Comm`, which a running
mesh, a test in one process and the estimator (`autopar.attention.program`, on meta tensors) each provide, so that what
is estimated and drawn is what runs. The algorithms are in `autopar.passes.attention`, whose import fills `ALGORITHMS`.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import torch

from autopar.attention.layouts import CONTIGUOUS, Blocks
from autopar.ir.placement import place_in_block, scaled_blocks


@dataclass(frozen=True)
class Span:
    """Positions [start, stop) of a sequence."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __and__(self, other: Span) -> Span:
        """The intersection; empty if they do not overlap."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))


Spans = tuple[Span, ...]


def spans_of(total: int, blocks: Blocks, ranks: int, rank: int) -> Spans:
    """The positions of a sequence of ``total`` that a rank holds, in the rank's order."""
    found, start = [], 0
    for block in scaled_blocks(blocks, total) or (total,):
        size, place = abs(block) // ranks, place_in_block(block, ranks, rank)
        found.append(Span(start + place * size, start + (place + 1) * size))
        start += abs(block)
    return tuple(found)


@dataclass(frozen=True)
class Mask:
    """The part of a mask that depends on positions alone; see `autopar.ops.mask_spec.MaskSpec`."""

    causal: bool = False
    window: int = 0
    chunk: int = 0

    def allows(self, rows: Span, columns: Span) -> str:
        """Which pairs of a block are allowed: "none", "all", "causal" (the triangle of a square on the diagonal), or
        "some" (anything else)."""
        pairs, size = self.pairs(rows, columns), len(rows)
        if not pairs:
            return "none"
        if self.causal and rows == columns and pairs == size * (size + 1) // 2:
            return "causal"
        return "all" if pairs == size * len(columns) else "some"

    def pairs(self, rows: Span, columns: Span) -> int:
        """How many (query, key) pairs of a block are allowed."""
        if not self.chunk:
            return self._band_pairs(rows, columns)
        first = max(rows.start, columns.start) // self.chunk
        last = (min(rows.stop, columns.stop) - 1) // self.chunk
        chunks = (Span(n * self.chunk, (n + 1) * self.chunk) for n in range(first, last + 1))
        return sum(self._band_pairs(rows & chunk, columns & chunk) for chunk in chunks)

    def _band_pairs(self, rows: Span, columns: Span) -> int:
        """Pairs within causal and window, which bound i - j from below and above."""
        if self.causal:
            below = _pairs_up_to(rows, columns, 0)
        elif self.window:
            below = _pairs_up_to(rows, columns, self.window - 1)
        else:
            below = len(rows) * len(columns)
        return below - (_pairs_up_to(rows, columns, -self.window) if self.window else 0)


def _pairs_up_to(rows: Span, columns: Span, shift: int) -> int:
    """How many pairs (i, j) of a block have j <= i + shift: row i has clamp(i + shift + 1 - start, 0, size) of them."""

    def ramp(start: int) -> int:  # sum over the rows of max(0, i + shift + 1 - start)
        return _triangle(rows.stop + shift - start) - _triangle(rows.start + shift - start)

    return ramp(columns.start) - ramp(columns.stop)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2 if n > 0 else 0


@dataclass(frozen=True)
class Problem:
    """One attention over the global sequence, with one rank's batch and heads on all other axes.

    batch, heads, kv_heads, queries, keys, width (of q and k), value_width: sizes. size: ranks on the axis.
    query_blocks, key_blocks: the layout of rows and columns. bias: "" (none), "rows" (differs between queries: each
    rank holds its own rows of it), "columns" (the same for all queries); bias_gradient: it is differentiated.
    segments, key_mask, sinks: whether there are any. softcap, dropout: as in `autopar.ops.mask_spec.MaskSpec`.
    documents: lengths of those of a row, all of it, that estimates assume; () if unknown.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    dtype: torch.dtype
    size: int
    mask: Mask = Mask()
    query_blocks: Blocks = CONTIGUOUS
    key_blocks: Blocks = CONTIGUOUS
    bias: str = ""
    bias_gradient: bool = False
    segments: bool = False
    key_mask: bool = False
    sinks: bool = False
    softcap: float = 0.0
    dropout: float = 0.0
    documents: tuple[int, ...] = ()

    @property
    def pairs(self) -> int:
        """Allowed (query, key) pairs of an example and head, within documents if they are known."""
        if not self.documents:
            return self.mask.pairs(Span(0, self.queries), Span(0, self.keys))
        ends = itertools.pairwise(itertools.accumulate(self.documents, initial=0))
        return sum(self.mask.pairs(Span(*both), Span(*both)) for both in ends)

    def rows(self, rank: int) -> Spans:
        """The queries of a rank."""
        return spans_of(self.queries, self.query_blocks, self.size, rank)

    def columns(self, rank: int) -> Spans:
        """The keys of a rank."""
        return spans_of(self.keys, self.key_blocks, self.size, rank)


def inner_problem(problem: Problem, head_ranks: int) -> Problem:
    """The problem that is left after ``head_ranks`` neighbouring ranks have exchanged heads for sequence."""
    if head_ranks == 1:
        return problem
    times = kv_repeats(problem.heads, problem.kv_heads, head_ranks)
    return dataclasses.replace(
        problem,
        heads=problem.heads // head_ranks,
        kv_heads=problem.kv_heads * times // head_ranks,
        size=problem.size // head_ranks,
    )


def kv_repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each key head is repeated so that heads divide over the ranks: the least number that works. Raises
    ValueError if the query heads do not divide."""
    group = heads // kv_heads
    for times in range(1, group + 1):
        if group % times == 0 and (kv_heads * times) % ranks == 0:
            return times
    raise ValueError(f"attention: {heads} query heads do not divide over {ranks} ranks; use one that exchanges none")

"""Which calls of a kernel bring some rows and some columns together: pure arithmetic on spans.

Each pair of a row span and a column span is classified by `Mask.allows`; neighbours that need no mask of their own are
joined. Zigzag over two ranks, S = 16, causal, seen by rank 0, which holds rows 0-3 and 12-15:

    its own columns            0-3      12-15                 columns of rank 1          4-7     8-11
    rows  0-3                  causal   none     one causal   rows  0-3                  none    none
    rows 12-15                 all      causal   call         rows 12-15                 all     all    one call
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.attention.problem import Mask, Span, Spans


@dataclass(frozen=True)
class Block:
    """One call: rows from the ``row``-th on and columns from the ``column``-th on, as they are stored, and where they
    stand in the whole sequence. kind: "all", "causal" (the triangle of a square) or "some"."""

    row: int
    rows: Spans
    column: int
    columns: Spans
    kind: str

    @property
    def height(self) -> int:
        """How many rows."""
        return sum(map(len, self.rows))

    @property
    def width(self) -> int:
        """How many columns."""
        return sum(map(len, self.columns))

    def pairs(self, mask: Mask) -> int:
        """How many (query, key) pairs are allowed by position."""
        return sum(mask.pairs(r, c) for r in self.rows for c in self.columns)


@functools.lru_cache(maxsize=4096)
def blocks_of(mask: Mask, rows: Spans, columns: Spans) -> tuple[Block, ...]:
    """The calls, without blocks in which nothing is allowed."""
    if mask.causal:  # squares on the diagonal become visible where one side's spans end inside of the other's
        rows, columns = _cut(rows, columns), _cut(columns, rows)
    grid = [[mask.allows(r, c) for c in columns] for r in rows]
    if _is_triangle(rows, columns, grid):
        return (Block(0, rows, 0, columns, "causal"),)
    return tuple(_joined(mask, rows, columns, grid))


def _cut(spans: Spans, others: Spans) -> Spans:
    """The same positions, cut where one of the others starts or stops."""
    edges = {edge for other in others for edge in (other.start, other.stop)}
    found: list[Span] = []
    for span in spans:
        inside = sorted(edge for edge in edges if span.start < edge < span.stop)
        found += itertools.starmap(Span, itertools.pairwise((span.start, *inside, span.stop)))
    return tuple(found)


def _is_triangle(rows: Spans, columns: Spans, grid: list[list[str]]) -> bool:
    """The same positions on both sides, each seeing itself and what came before."""
    wanted = ("none", "causal", "all")  # above, on and below the diagonal
    return rows == columns and all(
        status == wanted[(i >= j) + (i > j)] for i, line in enumerate(grid) for j, status in enumerate(line)
    )


def _joined(mask: Mask, rows: Spans, columns: Spans, grid: list[list[str]]) -> Iterator[Block]:
    """Rows with the same line of "all" and "none" together; in each line, neighbouring columns together."""
    row = 0
    for _, group in itertools.groupby(zip(rows, grid, range(len(rows))), key=_line_key):
        lines = list(group)
        together = tuple(span for span, _, _ in lines)
        for column, run, kind in _runs(columns, lines[0][1]):
            block = Block(row, together, column, run, kind)
            yield _trimmed(mask, block) if kind == "some" else block
        row += sum(map(len, together))


def _line_key(entry: tuple[Span, list[str], int]) -> object:
    """Rows with equal keys are joined: those whose line has no mask."""
    _, line, number = entry
    return tuple(line) if {"all", "none"}.issuperset(line) else number


def _runs(columns: Spans, line: list[str]) -> Iterator[tuple[int, Spans, str]]:
    """(first column, spans, status) of neighbouring columns that go together: all of "all", and those of "some" that
    are neighbours in the whole sequence, as one span."""
    first = 0
    run: list[Span] = []
    kind = "none"
    for span, status in zip(columns, line):
        if status == kind == "all":
            run.append(span)
        elif status == kind == "some" and run[-1].stop == span.start:
            run[-1] = Span(run[-1].start, span.stop)
        else:
            if kind != "none":
                yield first, tuple(run), kind
            first += sum(map(len, run))
            run, kind = [span], status
    if kind != "none":
        yield first, tuple(run), kind


def _trimmed(mask: Mask, block: Block) -> Block:
    """A block of one span each, without the rows and columns at its edges that have no partner."""
    (rows,), (columns,) = block.rows, block.columns
    columns = _reach(mask, rows, columns, before=True)
    rows = _reach(mask, columns, rows, before=False)
    row = block.row + rows.start - block.rows[0].start
    return Block(row, (rows,), block.column + columns.start - block.columns[0].start, (columns,), block.kind)


def _reach(mask: Mask, span: Span, others: Span, before: bool) -> Span:
    """The part of others that may be paired with something of span; ``before``: others are keys, which causal lets be
    seen up to the query."""
    start, stop = others.start, others.stop
    if mask.window:
        start, stop = max(start, span.start - mask.window + 1), min(stop, span.stop + mask.window - 1)
    if mask.causal:
        start, stop = (start, min(stop, span.stop)) if before else (max(start, span.start), stop)
    if mask.chunk:
        start = max(start, span.start // mask.chunk * mask.chunk)
        stop = min(stop, -(-span.stop // mask.chunk) * mask.chunk)
    return Span(start, stop)


def split_rows(block: Block, most: int) -> Iterator[Block]:
    """The block in pieces of at most ``most`` rows, each within one span."""
    row = block.row
    for span in block.rows:
        for start in range(span.start, span.stop, most):
            piece = Span(start, min(start + most, span.stop))
            yield dataclasses.replace(block, row=row, rows=(piece,))
            row += len(piece)

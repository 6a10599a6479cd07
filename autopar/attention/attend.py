"""Attention of some rows to some columns, block by block: the building block of algorithms over ranks.

A block is a span of rows and a span of columns. Blocks without allowed pairs are skipped, those without a mask and
triangles on the diagonal run as such, others get a mask computed from positions. Packed documents
(`autopar.ops.documents`) are blocks of their own, for each example where examples differ. Partial results are merged by
their log-sum-exp; gradients are accumulated. Both are kept in float32, or float64 for float64.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.attention.problem import Mask, Problem, Span, Spans
from autopar.ops import kernels
from autopar.ops.documents import Documents, Runs, documents_of
from autopar.ops.kernels import wide
from autopar.ops.mask_spec import MaskSpec


@dataclass
class Gradients:
    """Gradients of q, k, v and (if differentiated) of the bias, in the dtype in which they were accumulated."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None


__all__ = ["Attend", "Partials", "KernelCall", "stand_in", "wide"]

MOST_ENTRIES = 2**24  # of a mask; larger blocks are split along rows


@dataclass
class Partials:
    """The merged result so far: out [B, Hq, n, Dv] and lse [B, Hq, n] of n rows, wide; lse is -inf for empty rows."""

    out: Tensor
    lse: Tensor
    untouched: list[Span] = field(default_factory=list)  # rows without a result so far, if known

    @classmethod
    def empty(cls, q: Tensor, value_width: int) -> Partials:
        """No result yet, for the rows of q."""
        out = q.new_zeros(*q.shape[:-1], value_width, dtype=wide(q.dtype))
        lse = q.new_full(q.shape[:-1], float("-inf"), dtype=wide(q.dtype))
        return cls(out, lse, [Span(0, q.shape[2])])

    def merge(self, out: Tensor, lse: Tensor, first: int = 0, example: int | None = None) -> None:
        """Merge the partial result of consecutive rows from ``first`` on, of all examples or of one.

        out -= sigmoid(lse_block - lse) (out - out_block);  lse -= logsigmoid(lse - lse_block)
        """
        rows = Span(first, first + out.shape[2])
        mine, my_lse = (_example(x, example).narrow(2, first, len(rows)) for x in (self.out, self.lse))
        if self._touch(rows):
            mine.copy_(out)
            my_lse.copy_(lse)
            return
        if out.is_meta:  # meta tensors have no values
            return
        # an empty result has weight zero: the difference is NaN if there is nothing yet either
        weight = torch.sigmoid(lse - my_lse).masked_fill(lse == float("-inf"), 0.0)
        mine.lerp_(out.to(mine.dtype), weight.unsqueeze(-1))
        my_lse.copy_(torch.logaddexp(my_lse, lse))  # = lse - logsigmoid(lse - lse_block), also where both are -inf

    def _touch(self, rows: Span) -> bool:
        """Whether this is the first result for these rows."""
        fresh = any(rows & span == rows for span in self.untouched)
        parts = [(span & Span(0, rows.start), span & Span(rows.stop, span.stop)) for span in self.untouched]
        self.untouched = [part for pair in parts for part in pair if len(part)]
        return fresh


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel: its rows and columns, the allowed (query, key) pairs per example and head, the number of
    query heads and of examples."""

    rows: int
    columns: int
    pairs: int
    heads: int
    backward: bool = False
    examples: int = 1


class Attend:
    """Block attention of one rank.

    ``facts`` are those of `autopar::attention` with bias [B|1, Hq|1, own rows|1, all columns], key_mask and segments
    [B, all columns], in the order of the global sequence; ``facts.index`` holds the indices of batch and heads for
    dropout, if they are sharded. ``observe`` is called for each kernel call.
    """

    def __init__(
        self, problem: Problem, facts: MaskSpec, rank: int, observe: Callable[[KernelCall], None] | None = None
    ) -> None:
        assert not facts.offset, f"attention: rows of a sharded sequence have no offset, found {facts.offset}"
        self.problem, self.facts, self.rank = problem, facts, rank
        self.documents = documents_of(facts.segments, problem.documents)
        self.observe = observe

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Spans, columns: Spans, into: Partials) -> None:
        """Rows q [B, Hq, n, D] attend to columns k [B, Hk, m, D], v [B, Hk, m, Dv]; merged into ``into`` (n rows).

        ``rows`` and ``columns`` are the positions of these n and m in the global sequence. With a bias that differs
        between rows, the rows must be this rank's own.
        """
        for block in self._blocks(rows, columns):
            of_rows, of_columns = (2, block.row, block.height), (2, block.column, block.width)
            facts = self._facts(block, q.device)
            my_q, my_k, my_v = (_example(x, block.example) for x in (q, k, v))
            out, lse = kernels.forward(my_q.narrow(*of_rows), my_k.narrow(*of_columns), my_v.narrow(*of_columns), facts)
            into.merge(out, lse, block.row, block.example)
            self._tell(block, backward=False)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        rows: Spans,
        columns: Spans,
        into: Gradients,
    ) -> None:
        """Add the gradients of these rows (grad and out [B, Hq, n, Dv], lse [B, Hq, n]: final ones) and columns to
        ``into`` (q: n rows; k, v: m columns; bias: own rows, all columns)."""
        for block in self._blocks(rows, columns):
            of_rows, of_columns = (2, block.row, block.height), (2, block.column, block.width)
            my_grad, my_q, my_out, my_lse = (_example(x, block.example).narrow(*of_rows) for x in (grad, q, out, lse))
            my_k, my_v = (_example(x, block.example).narrow(*of_columns) for x in (k, v))
            facts = self._facts(block, q.device)
            to_q, to_k, to_v, to_bias = kernels.backward(
                my_grad, my_q, my_k, my_v, my_out, my_lse, facts, into.bias is not None
            )
            _example(into.q, block.example).narrow(*of_rows).add_(to_q)
            _example(into.k, block.example).narrow(*of_columns).add_(to_k)
            _example(into.v, block.example).narrow(*of_columns).add_(to_v)
            if into.bias is not None and to_bias is not None:
                self._add_bias(_example(into.bias, block.example), to_bias, block)
            self._tell(block, backward=True)

    def _tell(self, block: Block, backward: bool) -> None:
        if self.observe:
            pairs, examples = block.pairs(self.problem.mask), self.problem.batch if block.example is None else 1
            self.observe(KernelCall(block.height, block.width, pairs, self.problem.heads, backward, examples))

    # --- blocks ------------------------------------------------------------------------------------------

    def _blocks(self, rows: Spans, columns: Spans) -> Iterator[Block]:
        """The kernel calls: none where no documents meet; masks beyond the budget are split down to one row."""
        blocks = blocks_of(self.problem.mask, rows, columns)
        if self.documents is not None:
            made = functools.partial(document_blocks, self.problem.mask, rows, columns, self.documents)
            blocks = self.documents.once((self.problem.mask, rows, columns), made)
        for block in blocks:
            entries = self._entries(block)
            if entries <= MOST_ENTRIES or block.height == 1:
                yield block
                continue
            yield from split_rows(self.problem.mask, block, max(1, MOST_ENTRIES * block.height // entries))

    def _entries(self, block: Block) -> int:
        """The entries of the block's mask, 0 if it has none."""
        problem = self.problem
        by_example = self._by_documents(block) or (problem.key_mask and block.kind != "all")
        if not by_example and block.kind != "some":
            return 0
        return (problem.batch if by_example and block.example is None else 1) * block.height * block.width

    def _by_documents(self, block: Block) -> bool:
        """Whether documents need a mask in a block: where they are not known, and where it has several."""
        return self.facts.segments is not None and (self.documents is None or block.mixed)

    # --- mask of a block ---------------------------------------------------------------------------------

    def _facts(self, block: Block, device: torch.device) -> MaskSpec:
        facts, problem, mask = self.facts, self.problem, self.problem.mask
        some = block.kind == "some"  # one span each, with positions that differ by the offset
        changes: dict[str, Any] = {
            "causal": block.kind == "causal" or (some and mask.causal),
            "window": mask.window if some else 0,
            "offset": block.rows[0].start - block.columns[0].start if some else 0,
            "chunk": 0,
            "segments": None,
            "sinks": None,
        }
        if facts.bias is not None:
            changes["bias"] = _pick(self._own_rows(facts.bias, block), 3, block.columns)
        if facts.lift is not None:
            changes["lift"] = self._own_rows(facts.lift, block)
        if facts.key_mask is not None:
            changes["key_mask"] = _pick(facts.key_mask, 1, block.columns)
        if block.example is not None:
            tensors = {"bias", "lift", "key_mask"} & changes.keys()
            changes |= {name: _example(changes[name], block.example) for name in tensors}
        if device.type != "meta":
            changes["mask"] = self._mask(block, device)
            if facts.dropout:
                changes["index"] = self._index(block, device)
                changes["shape"] = [*(facts.shape or (problem.batch, problem.heads))[:2], problem.queries, problem.keys]
        return dataclasses.replace(facts, **changes)

    def _mask(self, block: Block, device: torch.device) -> Tensor | None:
        """The mask beyond the distance of positions, chunks and documents: bool [B|1, 1, n, m] or None."""
        chunk, segments = self.problem.mask.chunk, self.facts.segments if self._by_documents(block) else None
        terms = []
        if chunk and block.kind == "some":
            i, j = (positions(spans, device) // chunk for spans in (block.rows, block.columns))
            terms.append((i.unsqueeze(-1) == j)[None, None])
        if segments is not None:
            segments = _example(segments, block.example)
            i, j = (_pick(segments, 1, spans) for spans in (block.rows, block.columns))
            terms.append((i.unsqueeze(-1) == j.unsqueeze(-2)).unsqueeze(1))
        return functools.reduce(torch.Tensor.logical_and, terms) if terms else None

    def _index(self, block: Block, device: torch.device) -> list[Tensor]:
        """The global indices of the block's probabilities, for dropout."""
        whole = [torch.arange(size, device=device) for size in (self.problem.batch, self.problem.heads)]
        batch, heads = list(self.facts.index[:2]) or whole
        batch = _example(batch, block.example)
        return [batch, heads, positions(block.rows, device), positions(block.columns, device)]

    def _own(self, rows: Spans) -> Spans:
        """The positions of rows among this rank's own."""
        found, start = [], 0
        for mine in self.problem.rows(self.rank):
            found += [Span(r.start - mine.start + start, r.stop - mine.start + start) for r in rows if r & mine == r]
            start += len(mine)
        assert len(found) == len(rows), f"attention: rank {self.rank} has no bias for the rows {rows}"
        return tuple(found)

    def _own_rows(self, bias: Tensor, block: Block) -> Tensor:
        return bias if bias.shape[2] == 1 else _pick(bias, 2, self._own(block.rows))

    def _add_bias(self, into: Tensor, part: Tensor, block: Block) -> None:
        """Add the gradient of a block's bias at the positions of its entries."""
        rows = (Span(0, 1),) if into.shape[2] == 1 else self._own(block.rows)
        bands = part.split([len(r) for r in rows], 2)
        for r, band in zip(rows, bands):
            for c, piece in zip(block.columns, band.split([len(c) for c in block.columns], 3)):
                into[:, :, r.start : r.stop, c.start : c.stop] += piece


def positions(spans: Spans, device: torch.device) -> Tensor:
    """All positions of spans, in their order."""
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])


def _example(x: Tensor, example: int | None) -> Tensor:
    """One example of a batch, as a batch of one; all for None, and of what all share."""
    return x if example is None or x.shape[0] == 1 else x.narrow(0, example, 1)


def _pick(x: Tensor, dim: int, spans: Spans) -> Tensor:
    """The entries of spans along a dim; all of a dim that is broadcast."""
    if x.shape[dim] == 1:
        return x
    parts = [x.narrow(dim, span.start, len(span)) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def stand_in(grad: Tensor, delta: Tensor) -> Tensor:
    """An ``out`` [B, H, n, D] with rowsum(grad * out) = delta [B, H, n], which is all that a backward reads of it. Zero
    rows of grad give zero."""
    if grad.is_meta:
        return torch.empty_like(grad, dtype=delta.dtype)
    grad = grad.to(delta.dtype)
    largest = grad.abs().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == 0, 1.0)
    unit = grad / largest  # squares of tiny gradients would underflow
    length = unit.square().sum(-1, keepdim=True)
    return unit * (delta.unsqueeze(-1) / largest / length.masked_fill(length == 0, 1.0))


# --- blocks of scores ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One kernel call: rows from the ``row``-th on and columns from the ``column``-th on, as they are stored, and their
    positions in the global sequence. kind: "all", "causal" (the triangle of a square) or "some". example: None for all.
    mixed: several documents (`autopar.ops.documents.Run`)."""

    row: int
    rows: Spans
    column: int
    columns: Spans
    kind: str
    example: int | None = None
    mixed: bool = False

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
    """The kernel calls for rows and columns, without blocks in which nothing is allowed. Pairs of spans are classified
    by `Mask.allows`; neighbours that need no mask of their own are joined. Zigzag over two ranks, S = 16, causal, on
    rank 0, which holds rows 0-3 and 12-15:

        its own columns            0-3      12-15                 columns of rank 1          4-7     8-11
        rows  0-3                  causal   none     one causal   rows  0-3                  none    none
        rows 12-15                 all      causal   call         rows 12-15                 all     all    one call
    """
    if mask.causal:  # squares on the diagonal appear where one side's spans end inside the other's
        rows, columns = _cut(rows, columns), _cut(columns, rows)
    grid = [[mask.allows(r, c) for c in columns] for r in rows]
    if _is_triangle(rows, columns, grid):
        return (Block(0, rows, 0, columns, "causal"),)
    return tuple(_joined(mask, rows, columns, grid))


def _cut(spans: Spans, others: Spans) -> Spans:
    """The same positions, split where one of the others starts or stops."""
    edges = {edge for other in others for edge in (other.start, other.stop)}
    found: list[Span] = []
    for span in spans:
        inside = sorted(edge for edge in edges if span.start < edge < span.stop)
        found += itertools.starmap(Span, itertools.pairwise((span.start, *inside, span.stop)))
    return tuple(found)


def _is_triangle(rows: Spans, columns: Spans, grid: list[list[str]]) -> bool:
    """Whether both sides have the same positions, each attending to itself and to earlier ones."""
    wanted = ("none", "causal", "all")  # above, on and below the diagonal
    return rows == columns and all(
        status == wanted[(i >= j) + (i > j)] for i, line in enumerate(grid) for j, status in enumerate(line)
    )


def _joined(mask: Mask, rows: Spans, columns: Spans, grid: list[list[str]]) -> Iterator[Block]:
    """Rows with the same line of "all" and "none" joined; in each line, neighbouring columns joined."""
    row = 0
    for _, group in itertools.groupby(zip(rows, grid, range(len(rows))), key=_line_key):
        lines = list(group)
        together = tuple(span for span, _, _ in lines)
        for column, run, kind in _runs(columns, lines[0][1]):
            block = Block(row, together, column, run, kind)
            yield _trimmed(mask, block) if kind == "some" else block
        row += sum(map(len, together))


def _line_key(entry: tuple[Span, list[str], int]) -> object:
    """Rows with equal keys are joined: those whose line needs no mask."""
    _, line, number = entry
    return tuple(line) if {"all", "none"}.issuperset(line) else number


def _runs(columns: Spans, line: list[str]) -> Iterator[tuple[int, Spans, str]]:
    """(first column, spans, status) of columns that can be joined: all of "all", and those of "some" that are
    neighbours in the global sequence, as one span."""
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
    """A block of one span each, without the rows and columns at its edges that have no allowed pair."""
    (rows,), (columns,) = block.rows, block.columns
    columns = _reach(mask, rows, columns, before=True)
    rows = _reach(mask, columns, rows, before=False)
    row = block.row + rows.start - block.rows[0].start
    return Block(row, (rows,), block.column + columns.start - block.columns[0].start, (columns,), block.kind)


def _reach(mask: Mask, span: Span, others: Span, before: bool) -> Span:
    """The part of others that may be paired with something of span; ``before``: others are keys, which causal masks
    allow up to the query."""
    start, stop = others.start, others.stop
    if mask.window:
        start, stop = max(start, span.start - mask.window + 1), min(stop, span.stop + mask.window - 1)
    if mask.causal:
        start, stop = (start, min(stop, span.stop)) if before else (max(start, span.start), stop)
    if mask.chunk:
        start = max(start, span.start // mask.chunk * mask.chunk)
        stop = min(stop, -(-span.stop // mask.chunk) * mask.chunk)
    return Span(start, stop)


def document_blocks(mask: Mask, rows: Spans, columns: Spans, documents: Documents) -> tuple[Block, ...]:
    """The kernel calls for rows and columns of packed documents: `blocks_of` for each of the documents' blocks, and for
    each example unless they are alike."""
    found: list[Block] = []
    for example, runs in documents.by_example():
        of_rows, of_columns = _by_run(rows, runs), _by_run(columns, runs)
        for number in sorted(of_rows.keys() & of_columns.keys()):
            for (row, some_rows), (column, some_columns) in itertools.product(of_rows[number], of_columns[number]):
                for block in blocks_of(mask, some_rows, some_columns):
                    here = dataclasses.replace(block, row=block.row + row, column=block.column + column)
                    found.append(dataclasses.replace(here, example=example, mixed=runs[number].mixed))
    return tuple(found)


def _by_run(spans: Spans, runs: Runs) -> dict[int, list[tuple[int, Spans]]]:
    """Number of a run -> its parts of the spans: (first, spans) that lie side by side as they are stored."""
    found: dict[int, list[tuple[int, Spans]]] = {}
    first, starts = 0, [run.start for run in runs]
    for span in spans:
        low = max(0, bisect.bisect_right(starts, span.start) - 1)
        for number in range(low, bisect.bisect_left(starts, span.stop)):
            part = span & Span(runs[number].start, runs[number].stop)
            if not len(part):
                continue
            place, parts = first + part.start - span.start, found.setdefault(number, [])
            if parts and parts[-1][0] + sum(map(len, parts[-1][1])) == place:
                parts[-1] = (parts[-1][0], (*parts[-1][1], part))
            else:
                parts.append((place, (part,)))
        first += len(span)
    return found


def split_rows(mask: Mask, block: Block, most: int) -> Iterator[Block]:
    """The block, split into blocks of at most ``most`` rows, each within one span, trimmed to what it allows."""
    row = block.row
    for span in block.rows:
        for start in range(span.start, span.stop, most):
            piece = Span(start, min(start + most, span.stop))
            for part in blocks_of(mask, (piece,), block.columns):
                here = dataclasses.replace(part, row=part.row + row, column=part.column + block.column)
                yield dataclasses.replace(here, example=block.example, mixed=block.mixed)
            row += len(piece)

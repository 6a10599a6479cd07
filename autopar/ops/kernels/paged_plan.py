"""How the tokens of a step attend to paged keys: pure Python numbers, computed once per step and kind of pages.

A request's keys [low, high) lie in runs of consecutive pages; a run is one view of the pool. The mask is never a tensor
of all tokens and keys:

    Call      requests with one token each, whose keys are one run: one call on a strided view [rows, Hk, keys, D]. All
              keys are visible; a mask is needed only where numbers of keys differ
    Segment   tokens of one request that see the same keys, up to the triangle and the window. Chunks are segments of
              their own. Its pieces are the keys before its first token, which are not masked, and those from there on,
              which kernels mask by their causal flag; each in runs
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SHORTEST_CUT = 256  # tokens of a segment where the memory of a piece grows with its tokens and keys: masks, scores
BLOCK = 1024  # keys of a piece where a kernel's memory grows with them, and of copies

# Costs on a CPU, in units of the product of one number of a key by one of a query (0.1 ns):
CALL = 140_000  # one more call of a kernel
ROW = 7_000  # one more row and key head in a call


class Run(NamedTuple):
    """Keys that lie one after another: ``slot`` of the first in the pool, its position ``first``, their number."""

    slot: int
    first: int
    size: int


class Piece(NamedTuple):
    """Keys at positions [first, first + size): a view of one run, or copies of several."""

    first: int
    size: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Segment:
    """Tokens [begin, end) of a step, the first at position ``first``, attend to the pieces in turn."""

    begin: int
    end: int
    first: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Call:
    """Row i has its keys at [slot + i * distance, .. + keys).

    tokens: of each row; -1: of none. visible: (first, behind the last) of the keys that a row sees. first: position of
    the first key, where all rows have the same, else -1. copied: the keys of one row, if they are several runs.
    """

    slot: int
    distance: int
    keys: int
    tokens: tuple[int, ...]
    visible: tuple[tuple[int, int], ...]
    first: int
    copied: Piece | None = None

    @functools.cached_property
    def rows(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether the rows are of tokens one after another."""
        return self.tokens == tuple(range(self.tokens[0], self.tokens[0] + self.rows))

    @functools.cached_property
    def masked(self) -> bool:
        """Whether a row does not see all of its keys."""
        return any(keys != (0, self.keys) for keys in self.visible)


@dataclass(frozen=True)
class StepPlan:
    """idle: token ranges of pseudo-requests, whose results are zero."""

    calls: tuple[Call, ...]
    segments: tuple[Segment, ...]
    idle: tuple[tuple[int, int], ...]

    @functools.cached_property
    def one_call(self) -> bool:
        """Whether a call is all of it."""
        return len(self.calls) == 1 and self.calls[0].in_order and not self.segments and not self.idle


class Layout(NamedTuple):
    """What the plan of a step depends on, apart from the tables' contents.

    tokens: of the step. page, slots: size of a page, size of the pool. joined: requests may share a call, and pieces
    may depend on pages; else each is computed on its own, as if its keys were one run. fused: there is a kernel for one
    call of many rows. block: 0, or the most keys of a piece. short: runs of fewer keys are cheaper to copy than to
    attend to. work: numbers that a key is multiplied by, of all query heads. heads: key heads. by_position: the rows of
    a call need the same positions.
    """

    tokens: int
    window: int
    chunk: int
    page: int
    slots: int
    joined: bool
    fused: bool
    block: int
    short: int = 0
    work: int = 0
    heads: int = 0
    by_position: bool = False


def plan_step(table: np.ndarray, starts: Sequence[int], lengths: Sequence[int], layout: Layout) -> StepPlan:
    """The plan of a step. Raises ValueError for numbers that do not fit each other."""
    if starts[0] != 0 or starts[-1] != layout.tokens:
        raise ValueError(
            f"cached_attention: needs starts that end at the number of tokens, {layout.tokens}, found {starts[-1]}; "
            "starts[r] is where the tokens of request r begin"
        )
    jumps = _jumps(table)
    if (decoding := _decoding(table, jumps, starts, lengths, layout)) is not None:
        return StepPlan(tuple(_calls(decoding, layout)), (), ())
    alone: list[tuple[Run, int]] = []
    calls: list[Call] = []
    segments: list[Segment] = []
    idle: list[tuple[int, int]] = []
    for request, keys in enumerate(lengths):
        begin, end = starts[request], starts[request + 1]
        first = keys - (end - begin)
        if _is_padding(table, request, keys, layout.page):
            idle.append((begin, end))
            continue
        if first < 0 or end <= begin:
            raise ValueError(
                f"cached_attention: a request needs tokens, and a length that counts them, found {end - begin} tokens "
                f"and length {keys} of request {request}; lengths include the tokens of this step"
            )
        for a, b, low in _cuts(first, keys, layout):
            runs = list(_runs(table[request], jumps[request], request, low, b, layout))
            tokens = begin + a - first, begin + b - first
            if layout.fused and b - a == 1 and len(runs) == 1:
                alone.append((runs[0], tokens[0]))
                continue
            pieces = tuple(_pieces(runs, a, b, layout))
            if layout.fused and b - a == 1 and (len(pieces) == 1 or not layout.joined):
                whole = Piece(low, b - low, tuple(runs))
                calls.append(Call(0, 0, b - low, tokens[:1], ((0, b - low),), low, whole))
            else:
                segments.append(Segment(*tokens, a, pieces))
    return StepPlan((*calls, *_calls(alone, layout)), tuple(segments), tuple(idle))


def _decoding(
    table: np.ndarray, jumps: np.ndarray, starts: Sequence[int], lengths: Sequence[int], layout: Layout
) -> list[tuple[Run, int]] | None:
    """(run, token) of each request, if all have one token and one run of all their keys, which is what most steps are;
    else None."""
    count, page = len(lengths), layout.page
    if (
        layout.window
        or layout.chunk
        or not layout.fused
        or layout.tokens != count
        or list(starts) != [*range(count + 1)]
    ):
        return None
    every, last = np.arange(count), (np.asarray(lengths) - 1) // page
    if last.min() < 0 or last.max() >= table.shape[1] or jumps[every, last].any():
        return None
    first = table[:, 0]
    if first.min() < 1 or (int(table[every, last].max()) + 1) * page > layout.slots:
        return None
    slots = (first.astype(np.int64) * page).tolist()
    return [(Run(slot, 0, size), token) for token, (slot, size) in enumerate(zip(slots, lengths))]


def _is_padding(table: np.ndarray, request: int, keys: int, page: int) -> bool:
    """Whether the last page is 0. Raises ValueError if there is none."""
    column, columns = (keys - 1) // page, table.shape[1]
    if keys <= 0 or table[request, min(column, columns - 1)] == 0:
        return True
    if column >= columns:
        raise ValueError(
            f"cached_attention: request {request} needs {column + 1} pages, found a table of {columns} columns"
        )
    return False


def _cuts(first: int, end: int, layout: Layout) -> Iterator[tuple[int, int, int]]:
    """(first position, position behind the last, first visible key) of the parts of a request's tokens."""
    a = first
    while a < end:
        b, low = end, 0
        if layout.chunk:
            low = a // layout.chunk * layout.chunk
            b = min(b, low + layout.chunk)
        if layout.window:
            low = max(low, a - layout.window + 1)
            b = min(b, a + max(layout.window, SHORTEST_CUT))
        if layout.block:
            b = min(b, a + SHORTEST_CUT)
        yield a, b, low
        a = b


def _jumps(table: np.ndarray) -> np.ndarray:
    """[R, P]: how many pages up to this one do not follow the page before."""
    found = np.zeros(table.shape, dtype=np.int32)
    np.cumsum(table[:, 1:] != table[:, :-1] + 1, axis=1, out=found[:, 1:])
    return found


def _runs(row: np.ndarray, jumps: np.ndarray, request: int, low: int, high: int, layout: Layout) -> Iterator[Run]:
    """The runs of the keys at positions [low, high)."""
    page = layout.page
    column, behind = low // page, (high - 1) // page + 1
    begins = [0, behind - column]
    if jumps[behind - 1] != jumps[column]:
        begins[1:1] = (np.flatnonzero(np.diff(jumps[column:behind])) + 1).tolist()
    numbers = row[[column + begin for begin in begins[:-1]]].tolist()
    lengths = [end - begin for begin, end in itertools.pairwise(begins)]
    least, most = min(numbers), max(number + length for number, length in zip(numbers, lengths)) - 1
    if least < 1 or (most + 1) * page > layout.slots:
        raise ValueError(
            f"cached_attention: keys {low} to {high - 1} of request {request} need pages out of 1 to "
            f"{layout.slots // page - 1}, found {least} to {most}; page 0 is given to no request"
        )
    for number, begin, length in zip(numbers, begins, lengths):
        start = (column + begin) * page
        first = max(low, start)
        yield Run(number * page + first - start, first, min(high, start + length * page) - first)


def _pieces(runs: list[Run], first: int, end: int, layout: Layout) -> Iterator[Piece]:
    """Keys, cut at the first of several tokens, and into blocks."""
    low = runs[0].first
    bounds = [low, first, end] if end - first > 1 and low < first else [low, end]
    for begin, behind in itertools.pairwise(bounds):
        size = layout.block or behind - begin
        for at in range(begin, behind, size):
            inside = list(_clipped(runs, at, min(at + size, behind)))
            yield from _few(inside, layout) if layout.joined else [_piece(inside)]


def _clipped(runs: list[Run], begin: int, end: int) -> Iterator[Run]:
    """The parts of runs at positions [begin, end)."""
    for slot, first, size in runs:
        a, b = max(first, begin), min(first + size, end)
        if a < b:
            yield Run(slot + a - first, a, b - a)


def _few(runs: list[Run], layout: Layout) -> Iterator[Piece]:
    """Long runs as they are; neighbouring short ones together, at most `BLOCK` keys."""
    short, copied = list[Run](), 0
    for run in runs:
        long = run.size >= layout.short
        if short and (long or copied + run.size > BLOCK):
            yield _piece(short)
            short, copied = [], 0
        if long:
            yield _piece([run])
        else:
            short.append(run)
            copied += run.size
    if short:
        yield _piece(short)


def _piece(runs: list[Run]) -> Piece:
    return Piece(runs[0].first, runs[-1].first + runs[-1].size - runs[0].first, tuple(runs))


class _Row(NamedTuple):
    """A run, seen from the start of its first page: ``slot`` and ``position`` of that, and its keys [begin, end)."""

    slot: int
    begin: int
    end: int
    position: int
    token: int


class _Group:
    """A call that is being put together: rows whose first pages lie at multiples of a distance."""

    def __init__(self, row: _Row, layout: Layout) -> None:
        self.rows, self.layout = [row], layout
        self.distance, self.begin, self.end = 0, row.begin, row.end

    def cost(self, rows: int, keys: int) -> int:
        return CALL + rows * (keys * self.layout.work + self.layout.heads * ROW)

    def place(self, row: _Row, distance: int) -> int:
        """The number of a row."""
        return (row.slot - self.rows[0].slot) // distance if distance else 0

    def add(self, row: _Row) -> bool:
        """Whether it becomes a row: if that costs less than a call of its own, and every row stays within the pool."""
        distance = math.gcd(self.distance, row.slot - self.rows[0].slot)
        begin, end = min(self.begin, row.begin), max(self.end, row.end)
        if row.slot == self.rows[-1].slot or row.slot + end > self.layout.slots:
            return False
        if self.layout.by_position and row.position != self.rows[0].position:
            return False
        apart = self.cost(1 + self.place(self.rows[-1], self.distance), self.end - self.begin)
        if self.cost(1 + self.place(row, distance), end - begin) > apart + self.cost(1, row.end - row.begin):
            return False
        self.rows.append(row)
        self.distance, self.begin, self.end = distance, begin, end
        return True

    def call(self) -> Call:
        keys, places = self.end - self.begin, {self.place(row, self.distance): row for row in self.rows}
        every = range(max(places) + 1)
        tokens = tuple(places[i].token if i in places else -1 for i in every)
        visible = [
            (places[i].begin - self.begin, places[i].end - self.begin) if i in places else (0, keys) for i in every
        ]
        positions = {row.position for row in self.rows}
        first = positions.pop() + self.begin if len(positions) == 1 else -1
        return Call(self.rows[0].slot + self.begin, self.distance, keys, tokens, tuple(visible), first)


def _calls(alone: list[tuple[Run, int]], layout: Layout) -> Iterator[Call]:
    """Few calls: runs in the order of their slots, each joined to the call before if that is the cheaper way."""
    alone = sorted(alone)
    if (call := _even_call(alone, layout)) is not None:
        yield call
        return
    group: _Group | None = None
    for run, token in alone:
        before = run.slot % layout.page
        row = _Row(run.slot - before, before, before + run.size, run.first - before, token)
        if group is not None and layout.joined and group.add(row):
            continue
        if group is not None:
            yield group.call()
        group = _Group(row, layout)
    if group is not None:
        yield group.call()


def _even_call(alone: list[tuple[Run, int]], layout: Layout) -> Call | None:
    """One call of runs at equal distances that begin pages and have about as many keys; else None."""
    slots, sizes = [run.slot for run, _ in alone], [run.size for run, _ in alone]
    if len(alone) < 2 or not layout.joined or layout.by_position:
        return None
    distance, keys = slots[1] - slots[0], max(sizes)
    even = distance > 0 and slots == [*range(slots[0], slots[-1] + 1, distance)]
    if not even or keys * len(sizes) > 1.25 * sum(sizes) or slots[-1] + keys > layout.slots:
        return None
    if slots[0] % layout.page or distance % layout.page:
        return None
    first = alone[0][0].first if len({run.first for run, _ in alone}) == 1 else -1
    return Call(slots[0], distance, keys, tuple(t for _, t in alone), tuple((0, n) for n in sizes), first)

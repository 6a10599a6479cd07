"""Makes zero-bubble rows better by small moves on the critical path, as in job-shop scheduling (Nowicki and Smutnicki
1996: only a change at the ends of a block of the critical path can help)."""

from __future__ import annotations

import random
from collections.abc import Iterator

from autopar.runtime.schedules.zb_search import TOLERANCE, RowProblem, RowRun, Rows, run_rows


def refine(problem: RowProblem, rows: Rows, runs: int, bound: float) -> RowRun:
    """The best that ``runs`` trial runs find from ``rows``; stops at a cost of ``bound``. The same input gives the same
    result, as every rank must find the same order."""
    rng = random.Random(0)
    here = best = run_rows(problem, rows)
    assert here is not None and best is not None, "rows that have run before"
    moves = list(_moves(problem, here))
    while moves and runs and best.cost > bound * TOLERANCE:
        rank, row = moves.pop(rng.randrange(len(moves)))
        there = run_rows(problem, here.rows[:rank] + (row,) + here.rows[rank + 1 :])
        runs -= 1
        if there is None or _badness(there) > _badness(here):
            continue
        here, moves = there, list(_moves(problem, there))
        best = min(best, here, key=_badness)
    return best


def _badness(run: RowRun) -> tuple[float, float]:
    """Cost; then, as several ranks can be the slowest, how slow all are."""
    return run.cost, sum(span * span for span in run.spans)


def _moves(problem: RowProblem, run: RowRun) -> Iterator[tuple[int, str]]:
    """(rank, its new row) for each small change of the critical path that is in order and fits the memory."""
    blocks = _blocks(problem, run)
    for place, (rank, first, last) in enumerate(blocks):
        row = run.rows[rank]
        starts, ends = first == 0, place == 0
        for new in sorted(set(_changes(row, first, last, starts, ends)) - {row}):
            if problem.fits(rank, new):
                yield rank, new


def _changes(row: str, first: int, last: int, starts: bool, ends: bool) -> Iterator[str]:
    """W of a block goes behind or before it, its last or first two actions change places.

    Nothing waits for what comes last where the path ``ends``, and nothing came before where the rank ``starts``."""
    weights = [at for at in range(first, last + 1) if row[at] == "W"]
    if not ends:
        yield from (row[:at] + row[at + 1 : last + 1] + "W" + row[last + 1 :] for at in weights)
        if first < last:
            yield row[: last - 1] + row[last] + row[last - 1] + row[last + 1 :]
    if not starts:
        yield from (row[:first] + "W" + row[first:at] + row[at + 1 :] for at in weights)
        if first < last:
            yield row[:first] + row[first + 1] + row[first] + row[first + 2 :]


def _blocks(problem: RowProblem, run: RowRun) -> list[tuple[int, int, int]]:
    """The critical path of the slowest rank, backwards: (rank, first, last) are actions that run without a gap on one
    rank; the first of them waited for the last of the next block."""
    rank = run.spans.index(run.cost)
    last = len(run.rows[rank]) - 1
    blocks = []
    while True:
        row, start = run.rows[rank], run.start[rank]
        times = {"F": problem.F[rank], "B": problem.B[rank], "W": problem.W[rank]}
        first = last
        while first > 0 and start[first] <= (start[first - 1] + times[row[first - 1]]) * TOLERANCE:
            first -= 1
        blocks.append((rank, first, last))
        if first == 0:
            return blocks
        kind = row[first]
        rank += -1 if kind == "F" else 1
        last = _nth(run.rows[rank], kind, row.count(kind, 0, first))


def _nth(row: str, kind: str, n: int) -> int:
    """Position of the n-th ``kind``, from 0."""
    at = -1
    for _ in range(n + 1):
        at = row.index(kind, at + 1)
    return at

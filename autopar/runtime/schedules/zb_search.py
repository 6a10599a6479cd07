"""What the search for a zero-bubble order works on: rows of kinds, run and checked fast.

A row is what one rank does, as a word such as "FFBWBW". Microbatches are alike and go in order, so the k-th F of a row
is of microbatch k, and so for B and W.
"""

from __future__ import annotations

from dataclasses import dataclass

Rows = tuple[str, ...]
TOLERANCE = 1 + 1e-9  # what sums of floats may differ by


@dataclass(frozen=True)
class RowProblem:
    """Times and memory of every rank. F, B, W, held, stash: one value per rank; held: what F keeps for B, stash: what B
    leaves for W. limit: the memory that every rank may use."""

    microbatches: int
    F: tuple[float, ...]
    B: tuple[float, ...]
    W: tuple[float, ...]
    comm: float
    held: tuple[float, ...]
    stash: tuple[float, ...]
    limit: float

    @property
    def ranks(self) -> int:
        return len(self.F)

    @property
    def actions(self) -> int:
        """Number of actions of all ranks."""
        return 3 * self.microbatches * self.ranks

    def most_alive(self, rank: int) -> int:
        """How many microbatches can be between F and B on a rank."""
        held = self.held[rank]
        room = self.limit * TOLERANCE - max(0.0, self.stash[rank] - held)  # the last of them must get through B
        return min(self.microbatches, int(room / held)) if held else self.microbatches

    def fits(self, rank: int, row: str) -> bool:
        """Whether F, B and W of each microbatch follow each other, within the memory limit."""
        held, stash, limit = self.held[rank], self.stash[rank], self.limit * TOLERANCE
        alive = waiting = 0
        for kind in row:
            if kind == "F":
                alive += 1
            elif kind == "B":
                alive -= 1
                waiting += 1
            else:
                waiting -= 1
            if alive < 0 or waiting < 0 or alive * held + waiting * stash > limit:
                return False
        return True


@dataclass(frozen=True)
class RowRun:
    """Rows with times. start: per rank, of each action. spans: per rank, last end minus first start."""

    rows: Rows
    start: tuple[list[float], ...]
    spans: tuple[float, ...]

    @property
    def cost(self) -> float:
        """What the search makes small."""
        return max(self.spans)


def run_rows(problem: RowProblem, rows: Rows) -> RowRun | None:
    """Run rows as `autopar.schedule.simulate.simulate` does: in order, each action when its input is there. None: a
    deadlock."""
    running = _Running(problem, rows)
    ready = [0]
    while ready:
        ready += running.advance(ready.pop())
    if any(len(done) < len(row) for done, row in zip(running.start, rows)):
        return None
    return RowRun(rows, running.start, tuple(end - first[0] for end, first in zip(running.clock, running.start)))


class _Running:
    """Every rank goes as far as it can, and wakes up its neighbours."""

    def __init__(self, problem: RowProblem, rows: Rows) -> None:
        self.problem, self.rows = problem, rows
        self.clock = [0.0] * len(rows)
        self.start: tuple[list[float], ...] = tuple([] for _ in rows)
        self.F_end: list[list[float]] = [[] for _ in rows]
        self.B_end: list[list[float]] = [[] for _ in rows]

    def advance(self, rank: int) -> list[int]:
        """Run a rank until it waits for what a neighbour has not made; returns the neighbours to which it gave
        something. One loop without calls: the search spends most of its time here."""
        problem, now, start = self.problem, self.clock[rank], self.start[rank]
        F, B, W, comm = problem.F[rank], problem.B[rank], problem.W[rank], problem.comm
        F_end, B_end, last = self.F_end[rank], self.B_end[rank], len(self.rows) - 1
        above = self.F_end[rank - 1] if rank > 0 else None
        below = self.B_end[rank + 1] if rank < last else None
        forwards, backwards = len(F_end), len(B_end)
        for kind in self.rows[rank][len(start) :]:
            if kind == "W":
                start.append(now)
                now += W
                continue
            mine, other = (F_end, above) if kind == "F" else (B_end, below)
            if other is not None:
                if len(other) <= len(mine):
                    break
                arrival = other[len(mine)] + comm
                if arrival > now:
                    now = arrival
            start.append(now)
            now += F if kind == "F" else B
            mine.append(now)
        self.clock[rank] = now
        down = [rank + 1] if len(F_end) > forwards and rank < last else []
        return down + ([rank - 1] if len(B_end) > backwards and rank > 0 else [])


def lower_bound(problem: RowProblem) -> float:
    """No order within the limit costs less. A search that gets there may stop."""
    return max(max(_work_and_ends(problem, i), _chains(problem, i), _rounds(problem, i)) for i in range(problem.ranks))


def _latency(problem: RowProblem, rank: int) -> float:
    """The least time from the end of F to the start of the same microbatch's B."""
    below = slice(rank + 1, problem.ranks)
    return sum(problem.F[below]) + sum(problem.B[below]) + 2 * problem.comm * (problem.ranks - 1 - rank)


def _work_and_ends(problem: RowProblem, rank: int) -> float:
    """The rank's own work, and what cannot be filled while the first and the last microbatch are away."""
    F, B, W, m = problem.F[rank], problem.B[rank], problem.W[rank], problem.microbatches
    work, latency, most = m * (F + B + W), _latency(problem, rank), problem.most_alive(rank)
    before_first_B = max(0.0, latency - (most - 1) * F)
    if most == m:  # the two times may be one
        return work + before_first_B
    fill = 0.0  # what can be left over when the last F ends: B of those alive, W of these and of those waiting
    for alive in range(1, most + 1):
        room, stash = problem.limit * TOLERANCE - alive * problem.held[rank], problem.stash[rank]
        waiting = min(m - alive, int(room / stash)) if stash else m - alive
        fill = max(fill, (alive - 1) * B + (waiting + alive - 1) * W)
    return work + before_first_B + max(0.0, latency - fill)


def _chains(problem: RowProblem, rank: int) -> float:
    """All microbatches pass a later rank between the first F and the last B of this one, then comes a W."""
    F, B, W, m = problem.F, problem.B, problem.W, problem.microbatches
    longest = way = 0.0
    for other in range(rank, problem.ranks):
        longest = max(longest, way + m * (F[other] + B[other]) + W[rank])
        way += F[other] + B[other] + 2 * problem.comm
    return longest


def _rounds(problem: RowProblem, rank: int) -> float:
    """Memory is free for another microbatch only when an earlier one is back."""
    F, B, W, m = problem.F[rank], problem.B[rank], problem.W[rank], problem.microbatches
    there_and_back = F + _latency(problem, rank) + B
    rounds, rest = divmod(m - 1, problem.most_alive(rank))
    area = m * (problem.held[rank] * there_and_back + problem.stash[rank] * W)
    return max((rounds + 1) * there_and_back + rest * B + W, area / (problem.limit * TOLERANCE) if area else 0.0)

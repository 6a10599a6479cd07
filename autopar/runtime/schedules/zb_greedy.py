"""Zero-bubble rows by a greedy rule: whenever a rank is free, a policy picks F, B, W or a wait.

After Zero Bubble (Qi et al. 2024, section 3.1): forwards until memory is full, W where nothing else can run or memory
forces it, and choices between these that are tried one after the other.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import inf

from autopar.runtime.schedules.zb_search import TOLERANCE, RowProblem, Rows


@dataclass(frozen=True)
class Policy:
    """How a rank chooses.

    prefer: "F" or "B" when both can run; "turns": F after B, else B.
    fill: run W in a gap of at least ``fill`` times its time (0: never wait; 1: only where it fits).
    wait: delay an F by up to ``wait`` times its time for the first B, which all ranks before are waiting for.
    ahead: rank i of p has at most ahead[0] * (p-i) + ahead[1] microbatches between F and B (None: what memory holds).
    """

    prefer: str
    fill: float
    wait: float
    ahead: tuple[float, int] | None = None


# Ones that find good orders where others do not, best first: chosen on random costs by what each adds to those before.
POLICIES = (
    Policy("F", 0.25, 0, (2, -1)),
    Policy("B", 0, 1, (2, 0)),
    Policy("turns", 0.5, 0.5),
    Policy("B", 0, 0),
    Policy("turns", 0.75, 1, (1.5, 0)),
    Policy("turns", 0.25, 1),
    Policy("F", 0.75, 0, (2, -1)),
    Policy("turns", 0.25, 1, (2, -1)),
    Policy("B", 0.5, 0, (1, 0)),
    Policy("B", 0.25, 0, (1.5, 0)),
    Policy("F", 0.25, 0, (1.5, 1)),
    Policy("B", 0.5, 0, (1.5, 0)),
    Policy("B", 0.75, 0, (2, 0)),
    Policy("turns", 0, 0.5),
    Policy("B", 0, 0, (2, 0)),
    Policy("F", 1, 1, (1, 0)),
    Policy("turns", 0.25, 0.5, (2, 0)),
    Policy("B", 0.25, 0, (2, 1)),
    Policy("B", 0.75, 0.5, (1.5, 1)),
    Policy("F", 0.5, 0, (1.5, -1)),
    Policy("B", 1, 0, (2, -1)),
    Policy("B", 0.75, 0, (1, 1)),
    Policy("F", 0, 0, (2, 0)),
    Policy("B", 1, 1),
)


def greedy(problem: RowProblem, policy: Policy) -> Rows:
    """Rows of all ranks. They fit the memory limit and cannot deadlock."""
    return _Greedy(problem, policy).rows()


class _Greedy:
    """Ranks decide in the order of time, so each knows what its neighbours have begun and when that will arrive."""

    def __init__(self, problem: RowProblem, policy: Policy) -> None:
        p = problem.ranks
        self.problem, self.policy = problem, policy
        self.limit = problem.limit * TOLERANCE
        self.most = [self._most_ahead(rank) for rank in range(p)]
        self.F_end: list[list[float]] = [[] for _ in range(p)]
        self.B_end: list[list[float]] = [[] for _ in range(p)]
        self.row: list[list[str]] = [[] for _ in range(p)]
        self.asleep = [True] * p
        self.wake = [inf] * p
        self.events: list[tuple[float, int]] = []

    def _most_ahead(self, rank: int) -> int:
        if self.policy.ahead is None:
            return self.problem.microbatches
        slope, offset = self.policy.ahead
        return max(1, int(slope * (self.problem.ranks - rank)) + offset)

    def rows(self) -> Rows:
        self._wake(0, 0.0)
        while self.events:
            time, rank = heapq.heappop(self.events)
            if time != self.wake[rank]:  # a later event has taken its place
                continue
            kind, until = self._choose(rank, time)
            self.asleep[rank] = not kind
            if kind:
                until = self._execute(rank, kind, time)
            self.wake[rank] = inf
            if until < inf and len(self.row[rank]) < 3 * self.problem.microbatches:
                self._wake(rank, until)
        assert all(len(row) == 3 * self.problem.microbatches for row in self.row), "every rank can go on at any time"
        return tuple("".join(row) for row in self.row)

    def _wake(self, rank: int, time: float) -> None:
        self.wake[rank] = time
        heapq.heappush(self.events, (time, rank))

    def _choose(self, rank: int, time: float) -> tuple[str, float]:
        """A kind to run now; or "" and when to look again (inf: when a neighbour has begun something)."""
        problem, policy = self.problem, self.policy
        forwards, backwards = len(self.F_end[rank]), len(self.B_end[rank])
        waiting = 2 * backwards + forwards - len(self.row[rank])  # W that can run
        held, stash = problem.held[rank], problem.stash[rank]
        memory = (forwards - backwards) * held + waiting * stash
        F_comes, B_comes = self._F_comes(rank, forwards, backwards, memory, time), self._B_comes(rank, backwards, time)
        now = time + 1e-9 * (1 + time)
        if B_comes <= now and memory + stash - held > self.limit:
            return "W", time
        if B_comes <= now:
            F_first = policy.prefer == "F" or (policy.prefer == "turns" and self.row[rank][-1] == "B")
            return ("F" if F_first and F_comes <= now else "B"), time
        if F_comes <= now:
            patient = backwards == 0 and B_comes < time + policy.wait * problem.F[rank]
            return ("", B_comes) if patient else ("F", time)
        next_comes = min(F_comes, B_comes)
        if waiting and next_comes - time >= policy.fill * problem.W[rank]:
            return "W", time
        return "", next_comes

    def _F_comes(self, rank: int, forwards: int, backwards: int, memory: float, time: float) -> float:
        """When the next F can start, as far as known; inf when memory is full."""
        problem = self.problem
        if forwards == problem.microbatches or forwards - backwards >= self.most[rank]:
            return inf
        if memory + max(problem.held[rank], problem.stash[rank]) > self.limit:
            return inf
        if rank == 0:
            return time
        above = self.F_end[rank - 1]
        return above[forwards] + problem.comm if forwards < len(above) else inf

    def _B_comes(self, rank: int, backwards: int, time: float) -> float:
        if backwards == len(self.F_end[rank]):
            return inf
        if rank == self.problem.ranks - 1:
            return time
        below = self.B_end[rank + 1]
        return below[backwards] + self.problem.comm if backwards < len(below) else inf

    def _execute(self, rank: int, kind: str, time: float) -> float:
        """Run an action and tell the neighbour that waits for it; returns when it ends."""
        problem = self.problem
        self.row[rank].append(kind)
        if kind == "W":
            return time + problem.W[rank]
        end = time + (problem.F if kind == "F" else problem.B)[rank]
        (self.F_end if kind == "F" else self.B_end)[rank].append(end)
        neighbour = rank + 1 if kind == "F" else rank - 1
        arrival = end + problem.comm
        if 0 <= neighbour < problem.ranks and self.asleep[neighbour] and arrival < self.wake[neighbour]:
            self._wake(neighbour, arrival)
        return end

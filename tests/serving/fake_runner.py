"""A runner whose tokens are a function of the request alone, and which checks that the pages hold what they should."""

from __future__ import annotations

import random
from collections.abc import Sequence

from autopar.serving.requests import Request
from autopar.serving.sampling_params import Sampling
from autopar.serving.scheduler import Scheduler
from autopar.serving.step import Chosen, Row, Step

VOCAB = 50


def after(state: int, token: int) -> int:
    """What stands for a key and a value: a function of all tokens so far."""
    return hash((state, token, 17)) & (2**61 - 1)


def chosen(state: int, seed: int) -> int:
    return hash((state, seed)) % VOCAB


def expected(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    """The tokens that a request gets, computed without pages."""
    state, found = 0, list[int]()
    for token in prompt:
        state = after(state, token)
    for _ in range(count):
        found.append(chosen(state, seed))
        state = after(state, found[-1])
    return found


class FakeRunner:
    """Its pools hold `after` of every token. A row's earlier tokens must be found in its pages, of each window kind."""

    def __init__(
        self,
        pages: Sequence[int],
        windows: Sequence[int] = (0,),
        page_size: int = 4,
        replicas: int = 1,
        stages: int = 1,
        replica: int = 0,
        last: bool = True,
        reporters: Sequence[int] = (0,),
    ) -> None:
        self.pages, self.windows, self.page_size = tuple(pages), tuple(windows), page_size
        self.replicas, self.stages, self.replica, self.last = replicas, stages, replica, last
        self.reporters, self.has_other_roles = tuple(reporters), False
        self.traffic: dict[tuple[str, str], int] = {}
        self.timeline: list[object] = []
        self.page_bytes = tuple(1000 for _ in pages)
        self.pools: list[dict[tuple[int, int], int]] = [{} for _ in pages]
        self.computed = self.steps = 0
        self.fails_at: int | None = None

    def refresh(self, changed: bool = False) -> bool:
        return changed

    def run(self, step: Step) -> list[Chosen] | None:
        rows = step.rows[self.replica]
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError("the device is gone")
        found = [self._row(row) for row in rows]
        # Pages of one step: only requests that share a prefix have pages in common, and none of them writes these.
        written = [page for row in rows for page in row.pages[0][row.start // self.page_size :]]
        assert len(written) == len(set(written)), "two requests write one page"
        return [one for one in found if one is not None] if self.last else None

    def release(self) -> None:
        self.pools = [{} for _ in self.pages]

    def end(self, error: BaseException | None = None) -> None:
        pass

    def _row(self, row: Row) -> Chosen | None:
        assert row.tokens and len(row.pages) == len(self.windows)
        for i, token in enumerate(row.tokens):
            position = row.start + i
            state = after(self._at(row, 0, position - 1) if position else 0, token)
            for kind, pool in enumerate(self.pools):
                pool[self._slot(row, kind, position)] = state
            self.computed += 1
        # The windowed kinds hold the same as the unlimited one, where this row's tokens look.
        for kind, window in enumerate(self.windows):
            for position in range(max(0, row.start - window + 1) if window else 0, row.start):
                assert self._at(row, kind, position) == self._at(row, 0, position)
        if row.choice is None:
            return None
        assert row.choice.position == row.start + len(row.tokens)
        token = chosen(state, row.choice.seed)
        allowed = row.choice.allowed
        if allowed is not None:
            token = next(i for i in range(8 * len(allowed)) if allowed[i // 8] >> i % 8 & 1)
        return Chosen(token, 1.0 - row.choice.position)

    def _slot(self, row: Row, kind: int, position: int) -> tuple[int, int]:
        page = row.pages[kind][position // self.page_size]
        assert 0 < page < self.pages[kind], f"page {page} of kind {kind}"
        return page, position % self.page_size

    def _at(self, row: Row, kind: int, position: int) -> int:
        return self.pools[kind][self._slot(row, kind, position)]


def drive(scheduler: Scheduler, runner: FakeRunner, steps: int = 1) -> list[tuple[Row, ...]]:
    """Plan, run and collect up to so many steps; those that had rows."""
    found = []
    for _ in range(steps):
        rows = scheduler.next_step()
        if not rows:
            break
        chosen = runner.run(Step((rows,)))
        assert chosen is not None
        scheduler.collect(rows, chosen)
        found.append(rows)
    return found


def request(number: int, prompt: Sequence[int], most: int = 8, max_length: int = 64, **more: object) -> Request:
    """A request whose seed is its number."""
    sampling = Sampling(max_tokens=most, **more)
    return Request(number, tuple(prompt), sampling, number, max_length)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB), k=length))

"""`Scheduler`: what the next step of one replica computes. A pure function of its requests and the free pages.

Requests that decode come first, one token each; then chunks of prompts, up to ``step_tokens`` tokens in all; then
waiting requests join, in order of arrival, while their tokens fit into free pages and one page stays free for each
running request. A request whose next page is being computed by another waits until it is there. Where pages run out,
the youngest request goes back to waiting and is computed again later, its generated tokens as part of its prompt; its
tokens stay the same, since choices depend on seed and position alone.

With pipeline stages, requests are dealt to groups whose steps are in flight together. A group's next step is planned
when the tokens of its last one are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from autopar.serving.paged_cache import PagedCache
from autopar.serving.requests import FinishReason, Request
from autopar.serving.step import Chosen, Row


class Scheduler:
    """Requests of one replica.

    step_tokens: most tokens of a step. max_running: most requests that run at a time. groups: number of pipeline
    stages.
    """

    def __init__(self, cache: PagedCache, step_tokens: int, max_running: int, groups: int = 1) -> None:
        assert step_tokens >= max_running > 0, "all decode in one step"
        self.cache, self.step_tokens, self.max_running = cache, step_tokens, max_running
        self.waiting: deque[Request] = deque()
        self.running: list[list[Request]] = [[] for _ in range(groups)]  # in order of joining
        self.ended: list[Request] = []  # since the caller last took them
        self.prompt_tokens = self.cached_tokens = 0  # of requests that have joined
        self.preempted = 0  # how often a request went back to waiting
        self._requests: dict[int, Request] = {}
        self._rows: dict[int, Row] = {}  # of the step that is planned
        self._coming: dict[int, Request] = {}  # hash of a prefix of whole pages -> the running request that computes it
        self._hashes: dict[int, list[int]] = {}  # of requests: hash of each prefix of whole pages

    # --- requests come and go -------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Number of requests that wait or run."""
        return len(self._requests)

    def add(self, request: Request) -> None:
        """A new request, behind those that wait."""
        self._requests[request.id] = request
        self.waiting.append(request)

    def abort(self, request: int) -> None:
        """End a request, wherever it is; one that has ended is left alone. A step in flight is not stopped."""
        if request in self._requests:
            self._end(self._requests[request], "abort")

    def abort_all(self) -> None:
        """End all requests."""
        for request in list(self._requests):
            self.abort(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.state == "running":
            self._leave(request)
        else:
            self.waiting.remove(request)
        request.state, request.finish_reason = "finished", reason
        self._hashes.pop(request.id, None)
        del self._requests[request.id]
        self.ended.append(request)

    def _leave(self, request: Request) -> None:
        """A running request no longer runs: its pages are free."""
        self.running[request.group].remove(request)
        assert request.id not in self._rows, "the youngest request is planned last"
        self._no_longer_coming(request)
        self.cache.free(request)

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        self.preempted += 1
        request.state = "waiting"
        self.waiting.appendleft(request)

    # --- a step ---------------------------------------------------------------------------------------------------

    def next_step(self, group: int = 0) -> tuple[Row, ...]:
        """The rows of a group's next step, maybe none. Tokens of its last step must have been collected."""
        running, tokens = list(self.running[group]), self.step_tokens
        for request in running:
            if request.computed == len(request.tokens) - 1:
                tokens -= self._plan(request, 1)
        for request in running:
            if tokens > 0 and request.id not in self._rows:
                tokens -= self._plan(request, tokens)
        while tokens > 0 and self._join(group):
            request = self.running[group][-1]
            tokens -= self._plan(request, tokens)
            if request.state == "waiting":
                break  # there are no pages for its first tokens behind a window
        rows, self._rows = self._rows, {}
        for request_id in rows:
            request = self._requests[request_id]
            if request.computed // self.cache.page_size > request.remembered:
                self.cache.remember(request)
                if request.remembered == len(self._hashes.get(request_id, ())):
                    self._no_longer_coming(request)
        return tuple(sorted(rows.values(), key=_place))

    def _plan(self, request: Request, most: int) -> int:
        """A row of up to ``most`` tokens; their number, 0 if the request had to go."""
        if request.state != "running":
            return 0  # preempted by one before it
        start, length = request.computed, len(request.tokens)
        end = min(length, start + most)
        if end > request.room and not self._find_pages(request, start, end):
            return 0
        choice = None
        if end == length:
            try:
                choice = request.choice()
            except Exception as error:  # of a grammar: it ends this request alone
                request.error = error
                self._end(request, "error")
                return 0
            request.in_flight = True
        tokens = (request.tokens[start],) if end == start + 1 else tuple(request.tokens[start:end])
        self._rows[request.id] = Row(request.id, tokens, start, request.tables, choice)
        request.computed = end
        return end - start

    def _find_pages(self, request: Request, start: int, end: int) -> bool:
        """Pages for its tokens, from the youngest requests if there are too few; False if that is itself."""
        while not self.cache.extend(request, start, end):
            youngest = max((r for group in self.running for r in group), key=lambda r: r.id)
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _join(self, group: int) -> bool:
        """Whether the first waiting request can join; then it runs."""
        counts = [len(running) for running in self.running]
        wanted = min(sum(counts) + len(self.waiting), self.max_running)
        share = (wanted + len(counts) - 1 - group) // len(counts)
        if not self.waiting or sum(counts) >= self.max_running or counts[group] >= share:
            return False
        request = self.waiting[0]
        if request.in_flight:
            return False
        nodes = self.cache.known_prefix(request.tokens)
        if self._is_coming(request, len(nodes)) or not self.cache.admit(request, nodes, sum(counts)):
            return False
        self.waiting.popleft()
        request.state, request.group = "running", group
        self.running[group].append(request)
        self.prompt_tokens += len(request.tokens)
        self.cached_tokens += request.computed
        for prefix in self._hashes[request.id][request.remembered :]:
            self._coming.setdefault(prefix, request)
        return True

    def _is_coming(self, request: Request, known: int) -> bool:
        """Whether a running request computes this one's first page behind the ``known`` ones."""
        size, hashes = self.cache.page_size, self._hashes.setdefault(request.id, [])
        while (first := len(hashes) * size) + size <= len(request.tokens):
            hashes.append(hash((hashes[-1] if hashes else 0, tuple(request.tokens[first : first + size]))))
        return known < (len(request.tokens) - 1) // size and hashes[known] in self._coming

    def _no_longer_coming(self, request: Request) -> None:
        for prefix in self._hashes.get(request.id, ()):
            if self._coming.get(prefix) is request:
                del self._coming[prefix]

    def collect(self, rows: Iterable[Row], chosen: Sequence[Chosen]) -> list[tuple[Request, Chosen]]:
        """Tokens of a step's rows with a choice, in their order: given to their requests, which may end. Those whose
        request has ended meanwhile are dropped. Returns what was given."""
        given = []
        rows = [row for row in rows if row.choice is not None]
        assert len(rows) == len(chosen), "one token per row with a choice"
        for row, one in zip(rows, chosen):
            request = self._requests.get(row.request)
            if request is not None:
                request.in_flight = False
                request.accept(one)
                if not one.error:
                    given.append((request, one))
                if request.finish_reason:
                    self._end(request, request.finish_reason)
        return given


def _place(row: Row) -> tuple[bool, int]:
    """Requests that decode come first, and rows in the order of their places in the pool."""
    return len(row.tokens) > 1, row.pages[0][-1]

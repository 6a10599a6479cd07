"""Pages: no page twice, references, layout, and what a cache finds again."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from autopar.serving.paged_cache import PagedCache
from autopar.serving.pages import PagePool
from autopar.serving.requests import Request
from tests.serving.fake_runner import request


def pages_of(pool: PagePool, count: int, first: int = 0) -> list[int]:
    found = [pool.allocate(first)]
    while len(found) < count:
        found.append(pool.allocate(first + len(found), found[-1]))
    return found


def test_requests_start_in_free_regions() -> None:
    pool = PagePool(17, 4)
    assert pages_of(pool, 2) == [1, 2]
    assert pages_of(pool, 3, first=1) == [6, 7, 8]  # behind a shared page
    assert pages_of(pool, 4) == [9, 10, 11, 12]
    assert pages_of(pool, 1) == [13]
    # No region is free: of the fullest one, then its successor.
    assert pages_of(pool, 2) == [5, 3]
    assert pool.free == 4


def test_regions_are_used_again_in_the_order_in_which_they_were_freed() -> None:
    reused: list[int] = []
    pool = PagePool(13, 4, reused.append)
    first, second, third = (pages_of(pool, 4) for _ in range(3))
    assert pool.allocate(0) == 0 and pool.free == 0
    for pages in (second, first, third):
        pool.release(pages)
    reused.clear()
    assert pages_of(pool, 4) == second and pages_of(pool, 4) == first and reused == second + first


def test_a_windowed_request_goes_in_a_circle() -> None:
    pool = PagePool(9, 4)
    held: list[int] = []
    seen = []
    for index in range(10):
        held.append(pool.allocate(index, held[-1] if held else 0))
        seen.append(held[-1])
        if len(held) == 3:
            pool.release([held.pop(0)])
    assert seen == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


class Pools(RuleBasedStateMachine):
    """Requests that come, grow and go, in a cache with a window, against plain counts."""

    SIZE, WINDOW, LENGTH, CHUNK = 2, 5, 16, 6

    @initialize(full=st.integers(9, 40), windowed=st.integers(8, 30))
    def start(self, full: int, windowed: int) -> None:
        self.cache = PagedCache((full, windowed), (0, self.WINDOW), self.SIZE, self.LENGTH, self.CHUNK)
        self.requests: list[Request] = []
        self.content: list[dict[int, tuple[int, ...]]] = [{}, {}]  # page -> all tokens up to its end
        self.count = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), margin=st.integers(0, 2))
    def join(self, tokens: list[int], margin: int) -> None:
        self.count += 1
        one = request(self.count, tokens)
        nodes = self.cache.known_prefix(one.tokens)
        assert len(nodes) * self.SIZE < len(tokens)
        if not self.cache.admit(one, nodes, margin):
            assert self.requests or margin, "an empty cache holds any request"
            return
        self.requests.append(one)
        for kind, pages in enumerate(one.pages):
            first = max(0, one.computed - self.WINDOW + 1) // self.SIZE if kind else 0
            for index in range(first, len(nodes)):
                assert self.content[kind][pages[index]] == tuple(tokens[: (index + 1) * self.SIZE])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.requests))
        start = one.computed
        if start == len(one.tokens):
            if start == self.LENGTH:
                return
            one.tokens.append(data.draw(st.integers(0, 1)))
        end = min(len(one.tokens), start + data.draw(st.integers(1, self.CHUNK)))
        if not self.cache.extend(one, start, end):
            self.cache.free(one)
            self.requests.remove(one)
            return
        one.computed = end
        for kind, pages in enumerate(one.pages):
            assert len(pages) * self.SIZE >= end
            first = max(0, start - self.WINDOW + 1) // self.SIZE if kind else 0
            assert all(pages[first:]) and not any(pages[:first])
            for index in range(start // self.SIZE, -(-end // self.SIZE)):
                self.content[kind][pages[index]] = tuple(one.tokens[: min(end, (index + 1) * self.SIZE)])
        self.cache.remember(one)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.requests))
        self.cache.free(one)
        self.requests.remove(one)

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert len(self.cache._nodes) < self.cache.pools[0].pages, "a node for each page at most"
        for kind, pool in enumerate(self.cache.pools):
            held = Counter(page for one in self.requests for page in one.pages[kind] if page)
            assert all(pool.references(page) == held[page] for page in range(1, pool.pages))
            assert pool.free == pool.pages - 1 - len(held)
            free = [page for pages in pool._of_region for page in pages]
            assert sorted([*free, *held]) == list(range(1, pool.pages))
            for region, pages in enumerate(pool._of_region):
                assert [n for n, regions in enumerate(pool._with_free) if region in regions] == [len(pages)]

    def teardown(self) -> None:
        for one in getattr(self, "requests", ()):
            self.cache.free(one)
        if hasattr(self, "cache"):
            assert all(pool.free == pool.pages - 1 for pool in self.cache.pools)


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

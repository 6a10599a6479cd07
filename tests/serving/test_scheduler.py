"""What steps compute: decoding first, chunks of prompts, prefixes once, windows, preemption, aborts."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest

from autopar.serving.paged_cache import PagedCache
from autopar.serving.scheduler import Scheduler
from autopar.serving.step import Step
from tests.serving.fake_runner import FakeRunner, drive, expected, prompt, request


def make(
    pages: tuple[int, ...] = (65,), windows: tuple[int, ...] = (0,), step_tokens: int = 16, max_running: int = 8
) -> tuple[Scheduler, FakeRunner]:
    cache = PagedCache(pages, windows, 4, 64, step_tokens)
    return Scheduler(cache, step_tokens, max_running), FakeRunner(pages, windows)


def all_free(scheduler: Scheduler) -> bool:
    return all(pool.free == pool.pages - 1 for pool in scheduler.cache.pools)


def test_one_request() -> None:
    scheduler, runner = make()
    one = request(1, prompt(6))
    scheduler.add(one)
    steps = drive(scheduler, runner, 100)
    assert [len(rows[0].tokens) for rows in steps] == [6, 1, 1, 1, 1, 1, 1, 1]
    assert one.tokens[6:] == expected(one.prompt, 1, 8) and one.finish_reason == "length"
    assert scheduler.ended == [one] and all_free(scheduler)


def test_decoding_first_then_chunks() -> None:
    scheduler, runner = make(step_tokens=16)
    scheduler.add(request(1, prompt(5, 1)))
    scheduler.add(request(2, prompt(40, 2)))
    shapes = [sorted((row.request, len(row.tokens), row.choice is not None) for row in rows)
              for rows in drive(scheduler, runner, 5)]  # fmt: skip
    assert shapes == [
        [(1, 5, True), (2, 11, False)],
        [(1, 1, True), (2, 15, False)],
        [(1, 1, True), (2, 14, True)],
        [(1, 1, True), (2, 1, True)],
        [(1, 1, True), (2, 1, True)],
    ]


def test_requests_lie_at_equal_distances() -> None:
    scheduler, runner = make(pages=(130,), step_tokens=64)
    for number in range(1, 7):
        scheduler.add(request(number, prompt(9, number), most=30))
    last = drive(scheduler, runner, 20)[-1]
    firsts = [row.pages[0][0] for row in last]
    assert {b - a for a, b in pairwise(firsts)} == {16}
    assert all(row.pages[0] == tuple(range(first, first + len(row.pages[0]))) for row, first in zip(last, firsts))


def test_prefix_is_computed_once() -> None:
    cache = PagedCache((400,), (0,), 16, 600, 128)
    scheduler, runner = Scheduler(cache, 128, 8), FakeRunner((400,), page_size=16)
    shared = prompt(512)
    requests = [request(number, (*shared, number, number + 1), max_length=600) for number in range(1, 6)]
    for one in requests:
        scheduler.add(one)
    drive(scheduler, runner, 100)
    assert runner.computed == 512 + 5 * 2 + 5 * 7
    assert scheduler.cached_tokens == 4 * 512
    assert all(one.tokens[514:] == expected(one.prompt, one.id, 8) for one in requests)
    again = request(9, (*shared, 3), max_length=600)  # of requests that have ended
    scheduler.add(again)
    drive(scheduler, runner, 100)
    assert runner.computed == 512 + 5 * 9 + 8 and again.tokens[513:] == expected(again.prompt, 9, 8)
    assert all_free(scheduler)


def test_last_token_of_a_prompt_is_computed() -> None:
    scheduler, runner = make()
    for number in (1, 2):
        scheduler.add(request(number, prompt(8), most=1))
        drive(scheduler, runner, 10)
    assert runner.computed == 8 + 4


def test_window_gives_pages_back() -> None:
    scheduler, runner = make(pages=(65, 12), windows=(0, 8), step_tokens=8)
    one = request(1, prompt(40), most=20)
    scheduler.add(one)
    used = []
    while rows := scheduler.next_step():
        used.append(11 - scheduler.cache.pools[1].free)
        scheduler.collect(rows, runner.run(Step((rows,))) or [])
    assert max(used) <= scheduler.cache.most[1] == 5 and one.tokens[40:] == expected(one.prompt, 1, 20)
    assert all_free(scheduler)


def test_prefix_needs_what_the_window_sees() -> None:
    """Pages of the window's kind are overwritten by others: the prefix is computed again, from where it is seen."""
    scheduler, runner = make(pages=(129, 8), windows=(0, 8), step_tokens=8)
    first, other, again = (request(number, prompt(40, number % 2)) for number in (1, 2, 3))
    for one in (first, again):
        scheduler.add(one)
        drive(scheduler, runner, 100)
    assert scheduler.cached_tokens > 0
    hits = scheduler.cached_tokens
    scheduler.add(other)
    drive(scheduler, runner, 100)
    last = request(4, prompt(40, 1))
    scheduler.add(last)
    drive(scheduler, runner, 100)
    assert scheduler.cached_tokens == hits
    assert all(one.tokens[40:] == expected(one.prompt, one.id, 8) for one in (first, other, again, last))


def test_preemption_gives_the_same_tokens() -> None:
    scheduler, runner = make(pages=(18,), max_running=4)
    requests = [request(number, prompt(10, number), most=40) for number in (1, 2, 3)]
    for one in requests:
        scheduler.add(one)
    drive(scheduler, runner, 1000)
    assert runner.computed > 3 * 49 and scheduler.preempted > 0
    assert all(one.tokens[10:] == expected(one.prompt, one.id, 40) for one in requests)
    assert all_free(scheduler)


def test_max_length_and_stops() -> None:
    scheduler, runner = make()
    tokens = expected(prompt(6), 1, 30)
    until = request(1, prompt(6), most=30, stop_token_ids=(tokens[4],))
    late = request(1, prompt(6), most=30, stop_token_ids=(tokens[0],), min_tokens=3)
    heard: list[int] = []
    told = request(1, prompt(6), most=30)
    told.on_token = lambda token: heard.append(token) or len(heard) == 7  # type: ignore[func-returns-value]
    long = request(1, prompt(60), most=30)
    for one in (until, late, told, long):
        scheduler.add(one)
        drive(scheduler, runner, 100)
    first = tokens.index(tokens[4]) + 1
    assert until.finish_reason == "stop" and until.tokens[6:] == tokens[:first]
    assert late.generated >= 3
    assert told.finish_reason == "stop" and heard == tokens[:7]
    assert long.finish_reason == "length" and len(long.tokens) == 64


def test_changed_weights_forget_prefixes() -> None:
    """Also those that a running request had begun."""
    scheduler, runner = make()
    old, new = request(1, prompt(30), most=20), request(2, prompt(30), most=20)
    scheduler.add(old)
    drive(scheduler, runner, 1)
    assert 0 < old.remembered < 30 // 4
    scheduler.cache.forget()
    drive(scheduler, runner, 1)
    scheduler.add(new)
    drive(scheduler, runner, 100)
    assert scheduler.cached_tokens == 0 and new.tokens[30:] == expected(new.prompt, 2, 20)
    short = request(3, prompt(3, 3), most=20)  # of which no page was known
    scheduler.add(short)
    drive(scheduler, runner, 1)
    scheduler.cache.forget()
    drive(scheduler, runner, 100)
    scheduler.add(request(4, short.tokens))
    drive(scheduler, runner, 100)
    assert scheduler.cached_tokens == 0 and all_free(scheduler)


def test_what_is_overwritten_is_not_waited_for() -> None:
    """A running request has computed a prefix, but its pages behind the window are gone."""
    scheduler, runner = make(pages=(65, 21), windows=(0, 8), step_tokens=8)
    old, new = request(1, prompt(16), most=40), request(2, prompt(17), most=2)
    scheduler.add(old)
    drive(scheduler, runner, 20)
    scheduler.add(new)
    drive(scheduler, runner, 6)
    assert scheduler.cached_tokens == 0 and new.finish_reason and not old.finish_reason
    drive(scheduler, runner, 100)
    assert [one.tokens[len(one.prompt) :] for one in (old, new)] == [
        expected(old.prompt, 1, 40),
        expected(new.prompt, 2, 2),
    ]


def test_groups_get_equally_many() -> None:
    scheduler = Scheduler(PagedCache((200,), (0,), 4, 64, 64), 64, 16, 4)
    for number in range(1, 11):
        scheduler.add(request(number, prompt(5, number)))
    assert [len(scheduler.next_step(group)) for group in range(4)] == [3, 3, 2, 2]


def test_a_failing_request_ends_alone() -> None:
    class Broken:
        finished = False

        def bitmask(self) -> bytes | None:
            raise OSError("no grammar")

        def accept(self, token: int) -> None: ...

    scheduler, runner = make()
    bad, worse, good = request(1, prompt(6), grammar=Broken()), request(2, prompt(7)), request(3, prompt(5))
    worse.on_token = lambda token: 1 // 0 > 0
    for one in (bad, worse, good):
        scheduler.add(one)
    drive(scheduler, runner, 100)
    assert isinstance(bad.error, OSError) and isinstance(worse.error, ZeroDivisionError)
    assert [one.finish_reason for one in (bad, worse, good)] == ["error", "error", "length"]
    assert all_free(scheduler) and good.tokens[5:] == expected(good.prompt, 3, 8)


def test_too_small_a_cache() -> None:
    with pytest.raises(ValueError) as found:
        PagedCache((4,), (0,), 16, 4096, 512, [331_000])
    assert str(found.value) == (
        "serve: cache of 1.3 MB holds 3 pages of 16 tokens, one request of max_length 4096 needs 256; raise cache to "
        "85.1 MB, or lower max_length"
    )


@pytest.mark.parametrize(
    ("pages", "windows", "groups"),
    [((40,), (0,), 1), ((60, 20), (0, 8), 1), ((22,), (0,), 3), ((24, 9, 11), (0, 6, 13), 3)],
)
def test_many_random_requests(pages: tuple[int, ...], windows: tuple[int, ...], groups: int) -> None:
    """2,000 requests, with shared prefixes, aborts at every stage, and preemption; with groups, steps in flight."""
    drawn = random.Random(groups)
    scheduler = Scheduler(PagedCache(pages, windows, 4, 64, 16), 16, 8, groups)
    runner = FakeRunner(pages, windows)
    flights: list[tuple[tuple, list]] = [((), []) for _ in range(groups)]
    requests, group = [], 0
    while len(requests) < 2000 or scheduler.unfinished or any(rows for rows, _ in flights):
        while len(requests) < 2000 and len(scheduler.waiting) < 3:
            start = prompt(drawn.choice([0, 4, 12, 30]), drawn.randrange(3))
            number = len(requests) + 1
            tail = prompt(drawn.randrange(1, 25), number)
            requests.append(request(number, (*start, *tail), most=drawn.randrange(1, 25)))
            scheduler.add(requests[-1])
        if drawn.random() < 0.05:
            scheduler.abort(drawn.randrange(max(0, len(requests) - 12), len(requests)) + 1)
        scheduler.collect(*flights[group])
        rows = scheduler.next_step(group)
        assert sum(len(row.tokens) for row in rows) <= 16
        flights[group] = rows, runner.run(Step((rows,))) or []
        group = (group + 1) % groups
    assert all_free(scheduler) and len(scheduler.ended) == 2000 and not scheduler._coming and not scheduler._hashes
    assert {one.finish_reason for one in requests} == {"length", "abort"}
    for one in requests:
        assert list(one.tokens[len(one.prompt) :]) == expected(one.prompt, one.id, one.generated)
    assert scheduler.cached_tokens > 500 and scheduler.preempted >= 50 * (pages[0] < 50)


def test_planning_is_quick() -> None:
    """A step of 64 requests that decode: 0.2 ms on an idle machine; the best of many, and a limit for a busy one."""
    cache = PagedCache((64 * 256 + 1,), (0,), 16, 4096, 512)
    scheduler, runner = Scheduler(cache, 512, 64), FakeRunner((64 * 256 + 1,), page_size=16)
    for number in range(64):
        scheduler.add(request(number, prompt(100, number), most=200, max_length=4096))
    drive(scheduler, runner, 20)
    times = []
    for _ in range(100):
        start = time.perf_counter()
        rows = scheduler.next_step()
        times.append(time.perf_counter() - start)
        assert len(rows) == 64
        scheduler.collect(rows, runner.run(Step((rows,))) or [])
    print(f"planning: best {1e3 * min(times):.3f} ms, median {1e3 * sorted(times)[50]:.3f} ms")
    assert min(times) < 1e-3

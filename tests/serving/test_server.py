"""A server of one process: calls that drive it, and its thread; iteration, aborts, errors, the end."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from autopar.serving.calls import QueueFull
from autopar.serving.sampling_params import Sampling
from autopar.serving.server import Server
from tests.serving.fake_runner import VOCAB, FakeRunner, expected, prompt
from tests.support.ranks import refusal


def make(pages: int = 65, **options: Any) -> tuple[Server, FakeRunner]:
    runner = FakeRunner((pages,))
    return Server(runner, max_length=64, vocabulary=VOCAB, step_tokens=16, max_running=8, **options), runner


@pytest.fixture
def server() -> Iterator[Server]:
    with make()[0] as made:
        yield made


EIGHT = Sampling(max_tokens=8, seed=3, logprobs=0)


def test_generate_drives_in_the_calling_thread(server: Server) -> None:
    before = threading.active_count()
    prompts = [prompt(n) for n in range(1, 30)]
    tickets = server.complete(prompts, EIGHT)
    assert threading.active_count() == before
    assert [t.tokens for t in tickets] == [expected(p, 3, 8) for p in prompts]
    assert {t.finish_reason for t in tickets} == {"length"}
    assert tickets[3].logprobs == [-3.0 - i for i in range(8)]


def test_submit_drives_in_a_thread(server: Server) -> None:
    ticket = server.submit(prompt(9), EIGHT)
    assert list(ticket) == list(ticket) == ticket.result(5) == expected(prompt(9), 3, 8)
    assert [t.tokens for t in server.complete([prompt(5)], EIGHT)] == [expected(prompt(5), 3, 8)]


def test_waiting_drives(server: Server) -> None:
    """Without a thread: iterating drives as far as the next token."""
    before = threading.active_count()
    first, second = server.submit_all([prompt(9), prompt(5)], EIGHT, background=False)
    aborted = server.submit(prompt(7), EIGHT, background=False)
    aborted.abort()
    assert not first.tokens and first.finish_reason is None
    tokens = iter(first)
    assert [next(tokens), next(tokens)] == expected(prompt(9), 3, 8)[:2] and len(first.tokens) == 2
    assert not second.wait(0.0) and second.result() == expected(prompt(5), 3, 8)
    assert [*tokens] == expected(prompt(9), 3, 8)[2:]
    assert aborted.result() == [] and aborted.finish_reason == "abort"
    assert threading.active_count() == before

    async def rest() -> list[int]:
        return [token async for token in server.submit(prompt(4), EIGHT, background=False)]

    assert asyncio.run(rest()) == expected(prompt(4), 3, 8)


def test_drawn_seeds_differ(server: Server) -> None:
    first, second = server.complete([prompt(9)] * 2, Sampling(max_tokens=20))
    assert first.tokens != second.tokens


def test_n_of_one_prompt() -> None:
    server, runner = make()
    with server:
        tickets = server.submit_n(prompt(33), 4, EIGHT)
        assert [t.result(5) for t in tickets] == [expected(prompt(33), 3 + i, 8) for i in range(4)]
    assert runner.computed == 33 + 3 + 4 * 7


def test_async_iteration_in_several_loops(server: Server) -> None:
    async def tokens(seed: int) -> list[int]:
        return [token async for token in server.submit(prompt(9), Sampling(max_tokens=30, seed=seed))]

    async def several() -> list[list[int]]:
        return await asyncio.gather(*(tokens(seed) for seed in range(10)))

    found: list[list[list[int]]] = []
    threads = [threading.Thread(target=lambda: found.append(asyncio.run(several()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[expected(prompt(9), seed, 30) for seed in range(10)]] * 3


def test_async_iteration_can_be_cancelled(server: Server) -> None:
    async def run() -> None:
        ticket = server.submit(prompt(9), Sampling(max_tokens=1, seed=1))
        blocked = server.submit(prompt(9), Sampling(seed=1), on_token=lambda token: time.sleep(0.05) or False)  # type: ignore[func-returns-value]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(aiter_of(blocked, 40)), 0.2)
        blocked.abort()
        assert [token async for token in ticket] == expected(prompt(9), 1, 1)
        assert [token async for token in blocked] == expected(prompt(9), 1, 60)[: len(blocked.tokens)]
        assert blocked.finish_reason == "abort"

    async def aiter_of(ticket: Any, skipped: int) -> Any:
        seen = 0
        async for token in ticket:
            seen += 1
            if seen > skipped:
                yield token

    asyncio.run(run())


def test_abort_at_every_stage() -> None:
    server, _ = make()
    gate = threading.Event()
    with server:
        running = server.submit(prompt(9), Sampling(max_tokens=50), on_token=lambda token: not gate.wait(5))
        others = server.submit_all([prompt(9)] * 20, Sampling(max_tokens=50, seed=1))
        for ticket in (*others[::2], running):
            ticket.abort()
        gate.set()
        assert [t.result(5) for t in others[1::2]] == [expected(prompt(9), 1, 50)] * 10
        assert {t.finish_reason for t in (*others[::2], running)} == {"abort"}
        running.abort()  # nothing is left to end
        metrics = server.metrics()
        assert metrics.pages_used == metrics.running == metrics.waiting == 0
        assert metrics.finished == {"length": 10, "abort": 11}


def test_metrics() -> None:
    server, _ = make()
    with server:
        server.complete([prompt(9)], EIGHT)
        server.complete([prompt(9)], EIGHT)
        found = server.metrics()
    assert (found.generated_tokens, found.prompt_tokens, found.cached_tokens, found.steps) == (16, 18, 8, 16)
    assert (found.pages_used, found.pages_free) == (0, 64)
    assert sum(found.first_token.counts) == 2 and sum(found.next_token.counts) == 14
    assert 0 < found.first_token.sum < 5


def test_full_queue() -> None:
    server, _ = make(max_waiting=3)
    gate = threading.Event()
    with server:
        first = server.submit(prompt(9), EIGHT, on_token=lambda token: not gate.wait(5))
        while not first.tokens and server.metrics().waiting:
            time.sleep(0.001)
        tickets = server.submit_all([prompt(9)] * 3, EIGHT)
        with pytest.raises(QueueFull) as found:
            server.submit(prompt(9), EIGHT)
        gate.set()
        assert str(found.value) == (
            "serve: 3 of at most 3 requests wait, no room for 1 more; try again later, or raise max_waiting"
        )
        assert all(ticket.result(5) == expected(prompt(9), 3, 8) for ticket in (first, *tickets))
        assert len(server.complete([prompt(3)] * 10, EIGHT)) == 10  # a call that waits itself may be longer


@pytest.mark.parametrize(
    ("tokens", "sampling", "words"),
    [
        ([], {}, "serve: a prompt needs 1 to 63 tokens, found 0; begin with the token for the start of text"),
        ([1] * 64, {}, "serve: a prompt needs 1 to 63 tokens, found 64; shorten it, or raise max_length"),
        ([1, 50], {}, "serve: a prompt needs token ids from 0 to 49, found 50; use the tokenizer of this model"),
        (
            [1],
            {"logit_bias": {60: 1.0}},
            "sampling.logit_bias: expected token ids below 50, the size of the vocabulary, found 60",
        ),
    ],
)
def test_refused_requests(server: Server, tokens: list[int], sampling: dict[str, Any], words: str) -> None:
    assert refusal(server.submit, tokens, Sampling(**sampling)) == words
    assert server.submit([1], EIGHT).result(5) == expected([1], 3, 8)


def test_eos_of_the_server() -> None:
    tokens = expected(prompt(6), 3, 20)
    server, _ = make(eos_token_ids=[tokens[5]])
    with server:
        plain, ignoring, own = server.complete(
            [prompt(6)] * 3,
            [
                Sampling(max_tokens=20, seed=3),
                Sampling(max_tokens=20, seed=3, ignore_eos=True),
                Sampling(max_tokens=20, seed=3, eos_token_ids=(tokens[2],)),
            ],
        )
    assert plain.tokens == tokens[: tokens.index(tokens[5]) + 1] and plain.finish_reason == "stop"
    assert ignoring.tokens == tokens and own.tokens == tokens[: tokens.index(tokens[2]) + 1]


def test_close_aborts() -> None:
    server, _ = make()
    server.submit(prompt(3), EIGHT).result(5)
    ticket = server.submit(prompt(9), Sampling(max_tokens=50), on_token=lambda token: time.sleep(0.02) or False)  # type: ignore[func-returns-value]
    thread = server._thread
    server.close()
    server.close()
    assert ticket.finish_reason == "abort" and thread is not None and not thread.is_alive()
    assert refusal(server.submit, prompt(3)) == "serve: the server is closed; make a new one"
    assert refusal(server.complete, [prompt(3)]) == "serve: the server is closed; make a new one"


@pytest.mark.parametrize("threaded", [False, True])
def test_a_failing_step_breaks_the_server(threaded: bool) -> None:
    server, runner = make()
    runner.fails_at = 4
    if threaded:
        tickets = server.submit_all([prompt(9), prompt(8)], EIGHT)
        for ticket in tickets:
            with pytest.raises(RuntimeError, match="the device is gone"):
                ticket.result(5)
            assert ticket.finish_reason == "error" and len(ticket.tokens) >= 2
            with pytest.raises(RuntimeError, match="the device is gone"):
                list(ticket)
    else:
        with pytest.raises(RuntimeError, match="the device is gone"):
            server.complete([prompt(9), prompt(8)], EIGHT)
    assert refusal(server.submit, prompt(3)) == (
        "serve: the server ended by an error (RuntimeError: the device is gone); make a new one"
    )
    server.close()


def test_an_interrupt_aborts_requests() -> None:
    """A server takes long to make; Ctrl-C in a notebook does not cost it."""
    server, runner = make()
    run = runner.run

    def interrupted(rows: Any) -> Any:
        if runner.steps == 3:
            runner.steps += 1
            raise KeyboardInterrupt
        return run(rows)

    runner.run = interrupted  # type: ignore[method-assign]
    with server:
        first, second = server.submit_all([prompt(20), prompt(9)], EIGHT, background=False)
        with pytest.raises(KeyboardInterrupt):
            first.result()
        assert first.finish_reason == second.finish_reason == "abort"
        assert server.metrics().pages_used == server.metrics().running == 0
        assert [t.tokens for t in server.complete([prompt(20)] * 2, EIGHT)] == [expected(prompt(20), 3, 8)] * 2


def test_an_error_of_one_request_is_its_own(server: Server) -> None:
    bad, good = server.complete([prompt(9)] * 2, EIGHT, on_token=[lambda token: 1 // 0 > 0, None])
    assert bad.finish_reason == "error" and good.tokens == expected(prompt(9), 3, 8)
    with pytest.raises(ZeroDivisionError):
        bad.result()


def test_generate_in_several_threads(server: Server) -> None:
    found: dict[int, list[int]] = {}

    def run(seed: int) -> None:
        for ticket in server.complete([prompt(9)], Sampling(max_tokens=40, seed=seed)):
            found[seed] = ticket.tokens

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {seed: expected(prompt(9), seed, 40) for seed in range(6)}


@pytest.mark.parametrize("seed", range(5))
def test_close_while_others_make_calls(seed: int) -> None:
    """All threads get what they asked for, or that the server is closed; nobody hangs, no page is lost."""
    server, _ = make()
    wrong: list[object] = []

    def client(number: int) -> None:
        drawn = random.Random(10 * seed + number)
        while True:
            tokens, own = prompt(drawn.randrange(1, 30), drawn.randrange(3)), drawn.randrange(9)
            try:
                tickets = server.submit_n(
                    tokens, drawn.randrange(1, 4), Sampling(max_tokens=9, seed=own), background=drawn.random() < 0.5
                )
            except ValueError as error:
                if str(error) != "serve: the server is closed; make a new one":
                    wrong.append(error)
                return
            for i, ticket in enumerate(tickets):
                if drawn.random() < 0.2:
                    ticket.abort()
                found = ticket.result(20)
                if found != expected(tokens, own + i, 9)[: len(found)] or (
                    len(found) < 9 and ticket.finish_reason != "abort"
                ):
                    wrong.append((tokens, found))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    time.sleep(0.05 * seed)
    server.close()
    for thread in threads:
        thread.join(30)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    metrics = server.metrics()
    assert metrics.pages_used == metrics.running == metrics.waiting == 0

"""Servers on real ranks: replicas, pipeline stages with steps in flight, calls of all ranks, failures."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from autopar.runtime.mesh.process_groups import Groups, init_mesh
from autopar.serving.sampling_params import Sampling
from autopar.serving.server import Server
from tests.serving.fake_runner import VOCAB, FakeRunner, expected, prompt
from tests.support.ranks import close_pools, rank_outcomes, refusal, run_ranks

MESHES = [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "pp": 2}, {"pp": 4}, {"pp": 2, "tp": 2}, {"dp": 4}]


def make(sizes: dict[str, int], **options: Any) -> tuple[Server, FakeRunner]:
    """A server of a fake runner: each rank computes its replica's whole step; those of the last stage return it."""
    groups = Groups(init_mesh("cpu", **sizes))
    dp, pp, tp = (sizes.get(axis, 1) for axis in ("dp", "pp", "tp"))
    # The default order of axes, from slow to fast: pp, dp, tp.
    coordinates = [groups.mesh.coordinate(rank) for rank in range(dp * pp * tp)]
    reporters = [
        next(
            rank
            for rank, at in enumerate(coordinates)
            if (at.get("dp", 0), at.get("pp", 0), at.get("tp", 0)) == (replica, pp - 1, 0)
        )
        for replica in range(dp)
    ]
    here = groups.coordinate
    last = here.get("pp", 0) == pp - 1
    runner = FakeRunner((65,), (0,), 4, dp, pp, here.get("dp", 0), last, reporters)
    given = {"max_length": 64, "vocabulary": VOCAB, "step_tokens": 16, "max_running": 8, **options}
    return Server(runner, groups, **given), runner


EIGHT = Sampling(max_tokens=8, seed=3, logprobs=1)
PROMPTS = [prompt(n % 20 + 1, n) for n in range(30)]
EXPECTED = [expected(p, 3, 8) for p in PROMPTS]


def size(sizes: dict[str, int]) -> int:
    found = 1
    for n in sizes.values():
        found *= n
    return found


def generates(sizes: dict[str, int]) -> Any:
    server, runner = make(sizes)
    first = server.complete(PROMPTS, EIGHT)
    second = server.complete(PROMPTS[:3], EIGHT)
    assert len(server._control._sending) <= 64
    server.close()
    return [t.tokens for t in first], [t.tokens for t in second], first[3].logprobs, runner.steps


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_generate_on_all_ranks(sizes: dict[str, int]) -> None:
    for first, second, logprobs, _ in run_ranks(size(sizes), generates, sizes):
        assert first == EXPECTED and second == EXPECTED[:3]
        assert logprobs == [-3.0 - i for i in range(8)]


def serves(sizes: dict[str, int]) -> Any:
    server, _ = make(sizes)
    if dist.get_rank():
        server.run()
        return refusal(server.submit, [1])
    tickets = server.submit_all(PROMPTS, EIGHT)
    found = [list(ticket) for ticket in tickets]
    time.sleep(1.5)  # the others get empty messages
    found += [ticket.tokens for ticket in server.complete(PROMPTS, EIGHT)]
    server.close()
    return found


def drives_alone(sizes: dict[str, int]) -> Any:
    """Rank 0 generates in its own thread, the others serve."""
    server, _ = make(sizes)
    if dist.get_rank():
        return server.run()
    found = [ticket.tokens for _ in range(2) for ticket in server.complete(PROMPTS, EIGHT)]
    server.close()
    return found


@pytest.mark.parametrize("body", [serves, drives_alone])
@pytest.mark.parametrize("sizes", MESHES[:4], ids=str)
def test_rank_0_alone_makes_calls(sizes: dict[str, int], body: Any) -> None:
    found = run_ranks(size(sizes), body, sizes)
    assert found[0] == EXPECTED * 2
    words = "serve: the server is closed; make a new one" if body is serves else None
    assert found[1:] == [words] * (size(sizes) - 1)


def submits(sizes: dict[str, int], late: int) -> Any:
    """All ranks make the same calls; one of them late."""
    server, _ = make(sizes)
    tickets = server.submit_all(PROMPTS[:5], EIGHT)
    if dist.get_rank() == late:
        time.sleep(0.5)
    more = server.submit(PROMPTS[5], EIGHT)
    found = [list(ticket) for ticket in (*tickets, more)]
    found += [ticket.tokens for ticket in server.complete(PROMPTS[6:], EIGHT)]
    server.close()
    return found, more.prompt


@pytest.mark.parametrize("late", [0, 1])
def test_all_ranks_submit(late: int) -> None:
    assert run_ranks(2, submits, {"dp": 2}, late) == [(EXPECTED, PROMPTS[5])] * 2


def waits(sizes: dict[str, int]) -> Any:
    """All ranks make calls without a thread; rank 0 takes one ticket's tokens as they come."""
    server, _ = make(sizes)
    before = {*threading.enumerate()}  # those of earlier tests may end meanwhile
    tickets = [server.submit(tokens, EIGHT, background=False) for tokens in PROMPTS[:6]]
    found = [list(tickets[0]) if dist.get_rank() == 0 else tickets[0].result()]
    found += [ticket.result() for ticket in tickets[1:]]
    started = {*threading.enumerate()} - before
    server.close()
    return found, len(started)


@pytest.mark.parametrize("sizes", MESHES[:4], ids=str)
def test_waiting_drives_on_all_ranks(sizes: dict[str, int]) -> None:
    assert run_ranks(size(sizes), waits, sizes) == [(EXPECTED[:6], 0)] * size(sizes)


def others(threaded: bool) -> Any:
    server, _ = make({"dp": 2, "tp": 2})
    rank = dist.get_rank()
    server.complete(PROMPTS[:1], EIGHT)
    words = ""
    if threaded:
        ticket = server.submit([1, 2, 3 + rank % 3], EIGHT)
        words = refusal(ticket.result, 20)
    else:
        words = refusal(server.complete, [[1, 2, 3 + rank % 3]], EIGHT)
    again = server.complete(PROMPTS[:2], EIGHT)  # nobody was ended by that
    server.close()
    return words, [ticket.tokens for ticket in again]


WAY_OUT = "make the same calls on all ranks, or make them on rank 0 alone while the others are in server.run()"
OTHERS = "serve: call 2 needs the same requests on all ranks, found others on {} than on rank 0; " + WAY_OUT


def test_other_arguments_on_other_ranks() -> None:
    found = run_ranks(4, others, False)
    assert [words for words, _ in found] == [OTHERS.format("ranks 1, 2")] * 4
    assert all(tokens == EXPECTED[:2] for _, tokens in found)
    found = run_ranks(4, others, True)
    assert [words for words, _ in found] == [
        "no error", OTHERS.format("rank 1"), OTHERS.format("rank 2"), "no error"
    ]  # fmt: skip
    assert all(tokens == EXPECTED[:2] for _, tokens in found)


def refuses() -> Any:
    server, _ = make({"dp": 2}, max_waiting=2)
    found = []
    try:
        found.append(server.submit_all(PROMPTS[:3], EIGHT)[0].result(20))
    except ValueError as error:
        found.append(str(error))
    found.append(server.submit(PROMPTS[0], EIGHT).result(20))
    server.close()
    return found


def test_a_full_queue_on_all_ranks() -> None:
    words = "serve: 0 of at most 2 requests wait, no room for 3 more; try again later, or raise max_waiting"
    assert run_ranks(2, refuses) == [[words, EXPECTED[0]]] * 2


def long_messages() -> Any:
    """Longer than a message that needs no second one."""
    groups = Groups(init_mesh("cpu", dp=2))
    runner = FakeRunner((8001,), (0,), 4, 2, 1, groups.coordinate["dp"], True, (0, 1))
    with Server(runner, groups, max_length=30_000, vocabulary=VOCAB, step_tokens=30_000) as server:
        words = Sampling(max_tokens=3, seed=3, logprobs=1)
        return [ticket.tokens for ticket in server.complete([prompt(20_000), prompt(15_000, 2)], words)]


def test_long_messages() -> None:
    assert run_ranks(2, long_messages) == [[expected(p, 3, 3) for p in (prompt(20_000), prompt(15_000, 2))]] * 2


def aborts(sizes: dict[str, int]) -> Any:
    """Random requests and aborts from several threads of rank 0."""
    server, _ = make(sizes)
    if dist.get_rank():
        return server.run()

    def client(number: int) -> None:
        drawn = random.Random(number)
        for _ in range(40):
            tokens, seed = prompt(drawn.randrange(1, 30), drawn.randrange(3)), drawn.randrange(100)
            ticket = server.submit(tokens, Sampling(max_tokens=20, seed=seed))
            if drawn.random() < 0.5:
                for _ in zip(range(drawn.randrange(4)), ticket):
                    pass
                ticket.abort()
            found = ticket.result(60)
            right.append(found == expected(tokens, seed, 20)[: len(found)])
            reasons.add(ticket.finish_reason)

    right, reasons = list[bool](), set[Any]()
    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    metrics = server.metrics()
    server.close()
    return len(right), all(right), reasons, metrics.pages_used, metrics.running


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"pp": 2}], ids=str)
def test_random_requests_and_aborts(sizes: dict[str, int]) -> None:
    assert run_ranks(2, aborts, sizes)[0] == (240, True, {"length", "abort"}, 0, 0)


def dies(dying: int) -> Any:
    server, runner = make({"dp": 2})
    if dist.get_rank() == dying:
        run, steps = runner.run, itertools.count()
        runner.run = lambda rows: os._exit(7) if next(steps) == 3 else run(rows)  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        server.complete(PROMPTS, EIGHT)
    except RuntimeError as error:
        return str(error), time.monotonic() - start


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies(dying: int) -> None:
    outcomes = rank_outcomes(2, dies, dying, grace=30)
    close_pools()
    words, seconds = outcomes[1 - dying].value
    assert f"rank {dying}" in words and seconds < 30, words


def fails(sizes: dict[str, int], failing: int, way: str) -> Any:
    server, runner = make(sizes)
    if dist.get_rank() == failing:
        runner.fails_at = 5
    start, words = time.monotonic(), ""
    try:
        if way == "generate":
            server.complete(PROMPTS, EIGHT)
        elif dist.get_rank():
            server.run()
        else:
            server.submit(PROMPTS[0], EIGHT).result(60)
    except RuntimeError as error:
        words = str(error)
    later = refusal(server.submit, [1])
    server.close()
    return words, later, time.monotonic() - start


@pytest.mark.parametrize("way", ["generate", "run"])
@pytest.mark.parametrize(("sizes", "failing"), [({"dp": 2}, 0), ({"dp": 2}, 1), ({"pp": 2}, 1), ({"tp": 2}, 1)])
def test_a_failing_rank_breaks_the_server(sizes: dict[str, int], failing: int, way: str) -> None:
    try:
        found = run_ranks(2, fails, sizes, failing, way)
    finally:
        close_pools()
    for words, later, seconds in found:
        assert "the device is gone" in words and seconds < 40
        assert later.startswith("serve: the server ended by an error (")

"""Many clients at once, of which half leave: nothing is left of them, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time

import pytest

pytest.importorskip("fastapi")

import httpx

from tests.http_server.fake_engine import TEXT, FakeEngine, client_of, post, serving, until_idle


def test_a_client_that_leaves_ends_its_request() -> None:
    engine = FakeEngine(delay=0.02, max_length=5000)
    with serving(engine) as address:
        stream = client_of(address).completions.create(model="tiny", prompt="a", n=2, max_tokens=4000, stream=True)
        next(stream)
        stream.close()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 4000}, timeout=0.5)
        until_idle(engine)
        assert [ticket.aborted for ticket in engine.tickets] == [True] * 3
        assert all(len(ticket.tokens) < 200 for ticket in engine.tickets)
        assert 'autopar_requests_total{finish_reason="abort"} 3.0' in httpx.get(f"{address}/metrics").text


def test_a_server_that_ends_ends_its_requests() -> None:
    engine = FakeEngine(delay=0.02, max_length=5000)
    with serving(engine) as address:
        stream = client_of(address).completions.create(model="tiny", prompt="a", max_tokens=4000, stream=True)
        next(stream)
    assert engine.tickets[0].aborted


def test_metrics() -> None:
    engine = FakeEngine()
    with serving(engine) as address:
        post(address, "completions", prompt="abc", max_tokens=5, n=2)
        post(address, "completions", prompt=3)
        text = httpx.get(f"{address}/metrics").text
    found = dict(re.findall(r"^(autopar_\S+) (\S+)$", text, re.MULTILINE))
    expected = {
        "autopar_running": 0, "autopar_waiting": 0, "autopar_pages_used": 5, "autopar_pages_free": 6,
        "autopar_generated_tokens_total": 10, "autopar_prompt_tokens_total": 6, "autopar_cached_tokens_total": 2,
        "autopar_first_token_seconds_count": 6, 'autopar_next_token_seconds_bucket{le="0.2"}': 5,
        "autopar_next_token_seconds_sum": 1.5, 'autopar_requests_total{finish_reason="length"}': 2,
        'autopar_errors_total{status="400"}': 1,
    }  # fmt: skip
    assert {name: float(found[name]) for name in expected} == expected and float(found["autopar_steps_total"]) > 0


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.full)])
def test_many_clients_of_which_half_leave(seconds: int) -> None:
    engine = FakeEngine(delay=0.005, max_length=5000)
    with serving(engine) as address:
        results = asyncio.run(_clients(address, seconds))
        until_idle(engine)
        before = threading.active_count()
        assert post(address, "completions", prompt="a").status_code == 200
        assert threading.active_count() == before  # each connection, request and ticket is a task, no thread
        assert httpx.get(f"{address}/metrics").text.count("autopar_errors_total{") == 0
    stayed, left = sum(stay for stay, _ in results), sum(leave for _, leave in results)
    assert stayed >= 64 and left >= 64, (stayed, left)
    aborted = sum(ticket.finish_reason == "abort" for ticket in engine.tickets)
    assert 32 <= aborted <= left  # some left before their request was read
    assert all(ticket.finish_reason in ("abort", "length") for ticket in engine.tickets)


async def _clients(address: str, seconds: float) -> list[tuple[int, int]]:
    """(requests that were complete, requests that were left) of each client."""
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=60, limits=limits) as client:
        return await asyncio.gather(*(_client(client, i, end) for i in range(64)))


async def _client(client: httpx.AsyncClient, number: int, end: float) -> tuple[int, int]:
    counts = [0, 0]
    while time.monotonic() < end or not any(counts):
        leaves, stream = number % 2 == 1, number % 4 < 2
        body = {"prompt": f"client {number}", "max_tokens": 4000 if leaves else 20, "stream": stream, "temperature": 0}
        if leaves:
            await _leave(client, body)
        else:
            await _stay(client, body)
        counts[leaves] += 1
    return counts[0], counts[1]


async def _leave(client: httpx.AsyncClient, body: dict[str, object]) -> None:
    async def ask() -> None:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                pass

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(), 0.5)


async def _stay(client: httpx.AsyncClient, body: dict[str, object]) -> None:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    lines = response.text.split("\n\n") if body["stream"] else [f"data: {response.text}"]
    assert not body["stream"] or lines[-2:] == ["data: [DONE]", ""]
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")]
    assert "".join(texts) == TEXT.encode()[:20].decode(errors="replace")

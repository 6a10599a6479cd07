"""What is refused, and how: OpenAI's error object, the status, the field; and what an error must not do to others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx
import openai

from tests.http_server.fake_engine import TEXT, FakeEngine, client_of, post, serving, tokenizer, until_idle

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    engine = FakeEngine(fails_at=7)
    with serving(engine) as address:
        yield address
        until_idle(engine)


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperatur": 1}, "temperatur", "unknown field; did you mean 'temperature'?"),
    ({"max_new_tokens": 1}, "max_new_tokens", "did you mean 'max_tokens'?"),
    ({"colour": 1}, "colour", "unknown field; the fields are echo, "),
    ({"best_of": 3}, "best_of", "not supported here, found '3'; leave it out"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"echo": True, "logprobs": 1}, "echo", "not supported with logprobs"),
    ({"temperature": -1}, "temperature", "expected a number of at least 0"),
    ({"temperature": "hot"}, "temperature", "expected a number"),
    ({"top_p": 0}, "top_p", "above 0 and at most 1"),
    ({"top_k": -2}, "top_k", "at least -1"),
    ({"min_p": 2}, "min_p", "from 0 to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"n": 0}, "n", "at least 1 and at most 128"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "at most max_tokens"),
    ({"max_tokens": 200}, "max_tokens", "at most 200 tokens together"),
    ({"stop": ["a", ""]}, "stop", "none of them empty"),
    ({"stop": 5}, "stop", "a text or several"),
    ({"stop_token_ids": [260]}, "stop_token_ids", "below 260, found 260"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "by token id"),
    ({"logit_bias": {"260": 1}}, "logit_bias", "below 260"),
    ({"logit_bias": {"1": "much"}}, "logit_bias", "a number"),
    ({"logprobs": 21}, "logprobs", "at most 20"),
    ({"seed": 1.5}, "seed", "a whole number"),
    ({"stream": 1}, "stream", "True or False"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
    ({"stream": True, "stream_options": {"includeusage": True}}, "stream_options", "did you mean 'include_usage'?"),
    ({"response_format": {"type": "xml"}}, "response_format", "expected 'text', 'json_object' or 'json_schema'"),
    (schema(None), "response_format", "expected a JSON schema"),
    (schema({"type": "colour"}), "response_format", "does not compile"),
    ({"prompt": ""}, "prompt", "at least one token"),
    ({"prompt": []}, "prompt", "a text, token ids, or a list"),
    ({"prompt": [1, "a"]}, "prompt", "a list of token ids"),
    ({"prompt": [260]}, "prompt", "from 0 to 259"),
    ({"prompt": ["a"] * 9, "n": 128}, "n", "at most 1024 choices of all prompts together, found 1152"),
    ({"seed": 2**63}, "seed", "at most 9223372036854775807"),
    ({"prompt": {"a": 1}}, "prompt", "a text, token ids, or a list"),
    ({"prompt": "x" * 200}, "prompt", "at most 200 tokens together, found 200 of the prompt"),
]


@pytest.mark.parametrize("stream", [{}, {"stream": True}], ids=["whole", "stream"])
@pytest.mark.parametrize(("fields", "param", "message"), COMPLETIONS, ids=[str(c[0])[:40] for c in COMPLETIONS])
def test_completions(address: str, fields: dict[str, Any], param: str, message: str, stream: dict[str, Any]) -> None:
    if stream and "stream" in f"{fields}":
        return
    found = post(address, "completions", **{"prompt": "a"} | stream | fields)
    error = found.json()["error"]
    assert found.status_code == 400 and {*error} == {"message", "type", "param", "code"}
    assert message in error["message"] and "\n" not in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    if "tokens together" in message:
        assert error["code"] == "context_length_exceeded"


CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"store": True}, "store", "not supported"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
    ({"logprobs": 2}, "logprobs", "True or False"),
    ({"prompt": "a"}, "prompt", "unknown field"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "Hi"}, "messages", "a list"),
    ({"messages": [{"role": "boss", "content": "Hi"}]}, "messages[0].role", "found 'boss'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "found none"),
    ({"messages": [*HELLO, {"role": "user", "content": 3}]}, "messages[1].content", "a list of parts"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
        "only parts of type text are supported, found 'image_url'",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "the chat template refuses them: no tools"),
]


@pytest.mark.parametrize(("fields", "param", "message"), CHAT, ids=[str(c[0])[:40] for c in CHAT])
def test_chat(address: str, fields: dict[str, Any], param: str, message: str) -> None:
    found = post(address, "chat/completions", **{"messages": HELLO} | fields)
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, param) and message in error["message"]


def test_what_changes_nothing_is_accepted(address: str) -> None:
    more = {
        "user": "me", "store": False, "tools": [], "tool_choice": "auto", "metadata": {"a": "b"},
        "max_tokens": None, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True,
        "stop_token_ids": [63], "logit_bias": {"5": -100}, "top_p": 0.5, "presence_penalty": 1, "frequency_penalty": 1,
        "modalities": ["text"], "service_tier": "auto", "parallel_tool_calls": True, "max_completion_tokens": 3,
    }  # fmt: skip
    assert post(address, "chat/completions", messages=HELLO, **more).json()["usage"]["completion_tokens"] == 3
    assert post(address, "completions", prompt="a", best_of=1, suffix=None).status_code == 200


def test_bodies_and_paths(address: str) -> None:
    for content, message in (
        (b"{", "no JSON at line 1"),
        (b"\xff", "utf-8"),
        (b"[]", "found a list"),
        (b"", "no JSON"),
        (b'{"prompt": "\\ud83d"}', "surrogates not allowed"),
    ):
        found = httpx.post(f"{address}/v1/completions", content=content)
        assert found.status_code == 400 and message in found.json()["error"]["message"], found.text
    content = b'{"prompt": "\\ud83e\\uddc0", "echo": true, "max_tokens": 1}'
    assert httpx.post(f"{address}/v1/completions", content=content).json()["choices"][0]["text"] == "\U0001f9c0E"
    assert "prompt: needed" in post(address, "completions").json()["error"]["message"]
    assert httpx.get(f"{address}/v1/completions").status_code == 405
    assert httpx.get(f"{address}/v2").json()["error"]["message"] == "Not Found"


def test_errors_of_the_engine(address: str) -> None:
    found = post(address, "completions", prompt="x" * 13)
    assert (found.status_code, found.json()["error"]["message"][:20]) == (400, "prompt: 13 tokens br")
    found = post(address, "completions", prompt="x" * 7)
    assert (found.status_code, found.json()["error"]["type"]) == (500, "server_error")
    assert found.json()["error"]["message"] == "the kernel of this request broke"
    stream = client_of(address).completions.create(model="tiny", prompt="x" * 7, stream=True)
    with pytest.raises(openai.APIError, match="the kernel of this request broke"):
        print([*stream])
    assert post(address, "completions", prompt="a", temperature=0).json()["choices"][0]["text"] == TEXT[:14]


def test_a_full_queue_and_a_template_that_is_missing() -> None:
    engine = FakeEngine(delay=0.01, most=2)
    with serving(engine, tokenizer=tokenizer(None)) as address:
        client = client_of(address)
        stream = client.completions.create(model="tiny", prompt="a", n=2, max_tokens=100, stream=True)
        with stream, pytest.raises(openai.RateLimitError, match="at most 2 requests"):
            client.completions.create(model="tiny", prompt="a")
        until_idle(engine)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="tiny", prompt="a", n=3)  # the first two are ended
        until_idle(engine)
        with pytest.raises(openai.BadRequestError, match="need a tokenizer with a chat template") as caught:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}])
        assert caught.value.param == "messages"


def test_a_dead_rank() -> None:
    engine = FakeEngine(delay=0.01)
    with serving(engine) as address:
        assert httpx.get(f"{address}/health").json() == {"status": "ok"}
        stream = client_of(address).completions.create(model="tiny", prompt="a", max_tokens=190, stream=True)
        next(stream)
        engine.failure = "rank 3 died with exit code -9"
        with pytest.raises(openai.APIError, match="rank 3 died"):
            print([*stream])
        for found in (httpx.get(f"{address}/health"), post(address, "completions", prompt="a")):
            assert found.status_code == 503 and "rank 3 died" in found.json()["error"]["message"]
        with pytest.raises(openai.InternalServerError, match="rank 3 died"):
            client_of(address).completions.create(model="tiny", prompt="a")

"""openai's own client against the server: completions, chats, streams and errors, unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")

import openai

from tests.http_server.fake_engine import TEXT, FakeEngine, client_of, serving, until_idle

HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    engine = FakeEngine()
    with serving(engine) as address:
        yield client_of(address)
        until_idle(engine)


def prefix(tokens: int) -> str:
    """The text of so many tokens: whole characters, and one sign for a part of one."""
    return TEXT.encode()[:tokens].decode(errors="replace")


def test_completion(client: openai.OpenAI) -> None:
    found = client.completions.create(model="tiny", prompt="Hallo", max_tokens=12, temperature=0)
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason, choice.index) == (prefix(12), "length", 0)
    assert found.object == "text_completion" and found.id.startswith("cmpl-") and found.model == "tiny"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (5, 12, 17)
    default = client.completions.create(model="tiny", prompt="Hallo")
    assert default.usage is not None and default.usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "count"), [("a", 1), (["a", "bc"], 2), ([97, 98], 1), ([[97], [98, 99], [1]], 3)], ids=str
)
def test_prompts_of_every_kind(client: openai.OpenAI, prompt: object, count: int) -> None:
    found = client.completions.create(model="tiny", prompt=prompt, n=2, max_tokens=3, seed=0)  # type: ignore[arg-type]
    assert [choice.index for choice in found.choices] == [*range(2 * count)]
    assert {choice.text for choice in found.choices if choice.index % 2} == {TEXT[1:4]}  # seed 1
    echoed = client.completions.create(model="tiny", prompt=prompt, max_tokens=3, echo=True)  # type: ignore[arg-type]
    assert echoed.choices[-1].text.endswith(TEXT[:3]) and len(echoed.choices[-1].text) > 3


def test_chat(client: openai.OpenAI) -> None:
    parts: list[openai.types.chat.ChatCompletionContentPartTextParam] = [{"type": "text", "text": "Hello"}]
    for content in ("Hello", parts):
        found = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": content}], temperature=0, seed=3, user="me"
        )
        (choice,) = found.choices
        assert (choice.message.content, choice.message.role, choice.finish_reason) == (TEXT, "assistant", "stop")
        assert found.usage is not None and found.usage.prompt_tokens == 7  # <user> H e l l o <assistant>


def test_streams_send_whole_characters(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, n=2, stream_options={"include_usage": True}, temperature=0
    )
    chunks = [*stream]
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    *_, last = chunks
    assert not last.choices and last.usage is not None and last.usage.completion_tokens == 2 * (len(TEXT.encode()) + 1)
    for index in (0, 1):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        texts = [choice.delta.content or "" for choice in mine]
        assert "".join(texts) == TEXT and not any("\ufffd" in text for text in texts) and len(texts) > 20
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["stop"]
    texts = [
        chunk.choices[0].text for chunk in client.completions.create(model="tiny", prompt="a", stream=True, echo=True)
    ]
    assert "".join(texts) == "a" + prefix(16) and texts[0] == "a"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_never_sent_in_part(client: openai.OpenAI, stream: bool) -> None:
    for stop, expected in (("3 €", "Ein Käse für "), (["ßß", "☃ und", "🧀"], "Ein Käse für 3 €: "), ("und x", TEXT)):
        found = client.chat.completions.create(model="tiny", messages=HELLO, stop=stop, stream=stream, temperature=0)
        if isinstance(found, openai.Stream):
            choices = [chunk.choices[0] for chunk in found]
            texts, reason = [choice.delta.content or "" for choice in choices], choices[-1].finish_reason
            assert "3" not in "".join(texts) or stop != "3 €"
        else:
            texts, reason = [found.choices[0].message.content or ""], found.choices[0].finish_reason
        assert ("".join(texts), reason) == (expected, "stop")


def test_logprobs_of_both_apis(client: openai.OpenAI) -> None:
    for stream in (False, True):
        found = client.completions.create(model="tiny", prompt="a", logprobs=2, max_tokens=7, stream=stream)
        bodies = [*found] if isinstance(found, openai.Stream) else [found]
        given = [body.choices[0].logprobs for body in bodies]
        assert [t for g in given if g for t in g.tokens or ()] == [
            "E",
            "i",
            "n",
            " ",
            "K",
            "bytes:\\xc3",
            "bytes:\\xa4",
        ]
        assert [at for g in given if g for at in g.text_offset or ()] == [*range(7)]
        assert given[0] and given[0].token_logprobs and given[0].token_logprobs[0] == -0.5
        assert given[0].top_logprobs and given[0].top_logprobs[0] == {"E": -0.5, "A": -1.5}
    for stream in (False, True):
        chat = client.chat.completions.create(
            model="tiny", messages=HELLO, logprobs=True, top_logprobs=1, max_completion_tokens=6, stream=stream
        )
        parts = [*chat] if isinstance(chat, openai.Stream) else [chat]
        tokens = [t for part in parts if part.choices[0].logprobs for t in part.choices[0].logprobs.content or []]
        assert [t.token for t in tokens] == ["E", "i", "n", " ", "K", "\ufffd"]
        assert bytes(b for t in tokens for b in t.bytes or []) == TEXT.encode()[:6]
        assert tokens[0].logprob == -0.5 and [t.token for t in tokens[0].top_logprobs] == ["E"]
    plain = client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, max_tokens=1)
    assert plain.choices[0].logprobs and plain.choices[0].logprobs.content
    assert plain.choices[0].logprobs.content[0].top_logprobs == []


def test_answers_follow_a_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 1}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    }
    found = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        n=2,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    for choice in found.choices:
        value = json.loads(choice.message.content or "")
        assert {*value} == {"name", "count"} and isinstance(value["count"], int) and choice.finish_reason == "stop"
    plain = client.chat.completions.create(model="tiny", messages=HELLO, response_format={"type": "json_object"})
    assert isinstance(json.loads(plain.choices[0].message.content or ""), dict)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "autopar"
    with pytest.raises(openai.NotFoundError, match="did you mean 'tiny'"):
        client.models.retrieve("tinny")
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="huge", prompt="a")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"

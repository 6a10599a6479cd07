"""Responses in the format of OpenAI's API, by openai's own classes: of /v1/completions and of /v1/chat/completions."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionTokenLogprob,
    chat_completion,
    chat_completion_chunk,
)
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs

from autopar.integrations.http.engine import ServedModel
from autopar.integrations.http.generation import Generation, TextDelta, TokenLogprob
from autopar.integrations.http.parsed_request import ParsedRequest

Body: TypeAlias = Completion | ChatCompletion | ChatCompletionChunk


def usage_of(generation: Generation) -> CompletionUsage:
    """Tokens of prompts, each counted once, and of all choices."""
    prompt, completion = sum(map(len, generation.request.prompts)), sum(generation.generated)
    return CompletionUsage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


class Responses(Protocol):
    """The responses to one request."""

    def opening(self, choice: int) -> Body | None:
        """What a stream sends of a choice ahead of its text."""

    def chunk(self, delta: TextDelta) -> Body:
        """A chunk of a stream."""

    def whole(self, choices: Sequence[TextDelta], usage: CompletionUsage) -> Body:
        """The response without a stream: a delta for each choice, which is all of it."""

    def usage(self, usage: CompletionUsage) -> Body:
        """The last chunk of a stream with include_usage."""


class _Tokens:
    """Texts of single tokens."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    def text(self, token: int) -> str:
        found: str = self._served.tokenizer.decode([token])
        return found

    def name(self, token: int) -> str:
        """Its text, or as in OpenAI's API "bytes:\\xc3": parts of characters have the same text."""
        text = self.text(token)
        return "bytes:" + "".join(f"\\x{b:02x}" for b in self.bytes_of(token)) if "\ufffd" in text else text

    def bytes_of(self, token: int) -> list[int]:
        """A token may be a part of a character, which a text cannot show."""
        text = self.text(token)
        if "\ufffd" in text:
            with contextlib.suppress(ValueError):  # of a slow tokenizer
                return list(self._served.token_bytes.decode_bytes([token]))
        return list(text.encode())


class CompletionResponses:
    """Responses of /v1/completions."""

    def __init__(self, request: ParsedRequest, served: ServedModel) -> None:
        self._request, self._served, self._tokens = request, served, _Tokens(served)
        self._id, self._created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self._written = [0] * request.choices  # characters of each choice
        self._echoed = [
            served.tokenizer.decode(prompt, skip_special_tokens=True) if request.echo else ""
            for prompt in request.prompts
        ]

    def opening(self, choice: int) -> Completion | None:
        """The prompt, if it is to be repeated."""
        echoed = self._echoed[choice // self._request.n]
        return self._body([CompletionChoice.model_construct(index=choice, text=echoed)]) if echoed else None

    def chunk(self, delta: TextDelta) -> Completion:
        """A chunk of a stream."""
        return self._body([self._choice(delta, delta.text)])

    def whole(self, choices: Sequence[TextDelta], usage: CompletionUsage) -> Completion:
        """All choices."""
        texts = [self._echoed[delta.choice // self._request.n] + delta.text for delta in choices]
        return self._body([self._choice(delta, text) for delta, text in zip(choices, texts)], usage)

    def usage(self, usage: CompletionUsage) -> Completion:
        """No choices."""
        return self._body([], usage)

    def _body(self, choices: list[CompletionChoice], usage: CompletionUsage | None = None) -> Completion:
        return Completion.model_construct(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._served.name,
            choices=choices,
            usage=usage,
        )

    def _choice(self, delta: TextDelta, text: str) -> CompletionChoice:
        wanted = self._request.samplings[delta.choice].logprobs is not None
        return CompletionChoice.model_construct(
            index=delta.choice,
            text=text,
            logprobs=self._logprobs(delta) if wanted else None,
            finish_reason=delta.finish_reason,
        )

    def _logprobs(self, delta: TextDelta) -> Logprobs:
        found = Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        assert found.tokens is not None and found.token_logprobs is not None
        assert found.top_logprobs is not None and found.text_offset is not None
        for each in delta.logprobs:
            name = self._tokens.name(each.token)
            found.tokens.append(name)
            found.token_logprobs.append(each.logprob)
            # OpenAI's API adds the chosen token to the most likely ones.
            top = {self._tokens.name(token): logprob for token, logprob in each.top}
            found.top_logprobs.append(top | {name: each.logprob})
            found.text_offset.append(self._written[delta.choice])
            self._written[delta.choice] += len(self._tokens.text(each.token))
        return found


class ChatResponses:
    """Responses of /v1/chat/completions."""

    def __init__(self, request: ParsedRequest, served: ServedModel) -> None:
        self._request, self._served, self._tokens = request, served, _Tokens(served)
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    def opening(self, choice: int) -> ChatCompletionChunk:
        """The role."""
        delta = chat_completion_chunk.ChoiceDelta(role="assistant", content="")
        return self._chunk([chat_completion_chunk.Choice(index=choice, delta=delta, finish_reason=None)])

    def chunk(self, delta: TextDelta) -> ChatCompletionChunk:
        """A chunk of a stream."""
        logprobs = self._wanted(delta) and chat_completion_chunk.ChoiceLogprobs(content=[*self._logprobs(delta)])
        choice = chat_completion_chunk.Choice.model_construct(
            index=delta.choice,
            delta=chat_completion_chunk.ChoiceDelta.model_construct(content=delta.text),
            logprobs=logprobs or None,
            finish_reason=delta.finish_reason,
        )
        return self._chunk([choice])

    def whole(self, choices: Sequence[TextDelta], usage: CompletionUsage) -> ChatCompletion:
        """All choices."""
        return ChatCompletion.model_construct(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._served.name,
            choices=[self._choice(delta) for delta in choices],
            usage=usage,
        )

    def usage(self, usage: CompletionUsage) -> ChatCompletionChunk:
        """No choices."""
        return self._chunk([], usage)

    def _chunk(
        self, choices: list[chat_completion_chunk.Choice], usage: CompletionUsage | None = None
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk.model_construct(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._served.name,
            choices=choices,
            usage=usage,
        )

    def _choice(self, delta: TextDelta) -> chat_completion.Choice:
        logprobs = self._wanted(delta) and chat_completion.ChoiceLogprobs(content=[*self._logprobs(delta)])
        return chat_completion.Choice.model_construct(
            index=delta.choice,
            message=ChatCompletionMessage(role="assistant", content=delta.text, refusal=None),
            logprobs=logprobs or None,
            finish_reason=delta.finish_reason,
        )

    def _wanted(self, delta: TextDelta) -> bool:
        return self._request.samplings[delta.choice].logprobs is not None

    def _logprobs(self, delta: TextDelta) -> Iterator[ChatCompletionTokenLogprob]:
        for each in delta.logprobs:
            top = [
                TopLogprob(token=self._tokens.text(token), logprob=logprob, bytes=self._tokens.bytes_of(token))
                for token, logprob in each.top
            ]
            yield ChatCompletionTokenLogprob(
                token=self._tokens.text(each.token),
                logprob=each.logprob,
                bytes=self._tokens.bytes_of(each.token),
                top_logprobs=top,
            )


def joined(deltas: Sequence[TextDelta], choices: int) -> list[TextDelta]:
    """All deltas of each choice as one."""
    texts: list[list[str]] = [[] for _ in range(choices)]
    logprobs: list[list[TokenLogprob]] = [[] for _ in range(choices)]
    reasons: list[str | None] = [None] * choices
    for delta in deltas:
        texts[delta.choice].append(delta.text)
        logprobs[delta.choice].extend(delta.logprobs)
        reasons[delta.choice] = delta.finish_reason
    return [TextDelta(i, "".join(texts[i]), tuple(logprobs[i]), reasons[i]) for i in range(choices)]

"""Responses in the shapes of OpenAI's API, by openai's own classes: of /v1/completions and of /v1/chat/completions."""

from __future__ import annotations

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

from autopar.integrations.http.asked import Asked
from autopar.integrations.http.engine import Served
from autopar.integrations.http.generation import Generation, Piece, TokenLogprob

Body: TypeAlias = Completion | ChatCompletion | ChatCompletionChunk


def usage_of(generation: Generation) -> CompletionUsage:
    """Tokens of prompts, each counted once, and of all choices."""
    prompt, completion = sum(map(len, generation.asked.prompts)), sum(generation.generated)
    return CompletionUsage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


class Shape(Protocol):
    """The responses to one request."""

    def opening(self, choice: int) -> Body | None:
        """What a stream sends of a choice ahead of its text."""

    def chunk(self, piece: Piece) -> Body:
        """A piece of a stream."""

    def whole(self, choices: Sequence[Piece], usage: CompletionUsage) -> Body:
        """The response without a stream: a piece for each choice, which is all of it."""

    def usage(self, usage: CompletionUsage) -> Body:
        """The end of a stream that was asked for its usage."""


class _Tokens:
    """Texts of single tokens."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def text(self, token: int) -> str:
        found: str = self._served.tokenizer.decode([token])
        return found

    def bytes_of(self, token: int) -> list[int]:
        """A token may be a part of a character, which a text cannot show."""
        text = self.text(token)
        return list(self._served.token_bytes.decode_bytes([token]) if "\ufffd" in text else text.encode())


class CompletionShape:
    """Responses of /v1/completions."""

    def __init__(self, asked: Asked, served: Served) -> None:
        self._asked, self._served, self._tokens = asked, served, _Tokens(served)
        self._id, self._created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self._written = [0] * asked.choices  # characters of each choice
        self._echoed = [
            served.tokenizer.decode(prompt, skip_special_tokens=True) if asked.echo else "" for prompt in asked.prompts
        ]

    def opening(self, choice: int) -> Completion | None:
        """The prompt, if it is to be repeated."""
        echoed = self._echoed[choice // self._asked.n]
        return self._body([CompletionChoice.model_construct(index=choice, text=echoed)]) if echoed else None

    def chunk(self, piece: Piece) -> Completion:
        """A piece of a stream."""
        return self._body([self._choice(piece, piece.text)])

    def whole(self, choices: Sequence[Piece], usage: CompletionUsage) -> Completion:
        """All choices."""
        texts = [self._echoed[piece.choice // self._asked.n] + piece.text for piece in choices]
        return self._body([self._choice(piece, text) for piece, text in zip(choices, texts)], usage)

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

    def _choice(self, piece: Piece, text: str) -> CompletionChoice:
        wanted = self._asked.samplings[piece.choice].logprobs is not None
        return CompletionChoice.model_construct(
            index=piece.choice,
            text=text,
            logprobs=self._logprobs(piece) if wanted else None,
            finish_reason=piece.finish_reason,
        )

    def _logprobs(self, piece: Piece) -> Logprobs:
        found = Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        assert found.tokens is not None and found.token_logprobs is not None
        assert found.top_logprobs is not None and found.text_offset is not None
        for each in piece.logprobs:
            text = self._tokens.text(each.token)
            found.tokens.append(text)
            found.token_logprobs.append(each.logprob)
            # OpenAI's API adds the chosen token to the most likely ones.
            top = {self._tokens.text(token): logprob for token, logprob in each.top}
            found.top_logprobs.append(top | {text: each.logprob})
            found.text_offset.append(self._written[piece.choice])
            self._written[piece.choice] += len(text)
        return found


class ChatShape:
    """Responses of /v1/chat/completions."""

    def __init__(self, asked: Asked, served: Served) -> None:
        self._asked, self._served, self._tokens = asked, served, _Tokens(served)
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    def opening(self, choice: int) -> ChatCompletionChunk:
        """The role."""
        delta = chat_completion_chunk.ChoiceDelta(role="assistant", content="")
        return self._chunk([chat_completion_chunk.Choice(index=choice, delta=delta, finish_reason=None)])

    def chunk(self, piece: Piece) -> ChatCompletionChunk:
        """A piece of a stream."""
        delta = chat_completion_chunk.ChoiceDelta.model_construct(content=piece.text)
        logprobs = self._wanted(piece) and chat_completion_chunk.ChoiceLogprobs(content=[*self._logprobs(piece)])
        choice = chat_completion_chunk.Choice.model_construct(
            index=piece.choice, delta=delta, logprobs=logprobs or None, finish_reason=piece.finish_reason
        )
        return self._chunk([choice])

    def whole(self, choices: Sequence[Piece], usage: CompletionUsage) -> ChatCompletion:
        """All choices."""
        return ChatCompletion.model_construct(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._served.name,
            choices=[self._choice(piece) for piece in choices],
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

    def _choice(self, piece: Piece) -> chat_completion.Choice:
        logprobs = self._wanted(piece) and chat_completion.ChoiceLogprobs(content=[*self._logprobs(piece)])
        return chat_completion.Choice.model_construct(
            index=piece.choice,
            message=ChatCompletionMessage(role="assistant", content=piece.text, refusal=None),
            logprobs=logprobs or None,
            finish_reason=piece.finish_reason,
        )

    def _wanted(self, piece: Piece) -> bool:
        return self._asked.samplings[piece.choice].logprobs is not None

    def _logprobs(self, piece: Piece) -> Iterator[ChatCompletionTokenLogprob]:
        for each in piece.logprobs:
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


def joined(pieces: Sequence[Piece], choices: int) -> list[Piece]:
    """All pieces of each choice as one."""
    texts: list[list[str]] = [[] for _ in range(choices)]
    logprobs: list[list[TokenLogprob]] = [[] for _ in range(choices)]
    reasons: list[str | None] = [None] * choices
    for piece in pieces:
        texts[piece.choice].append(piece.text)
        logprobs[piece.choice].extend(piece.logprobs)
        reasons[piece.choice] = piece.finish_reason
    return [Piece(i, "".join(texts[i]), tuple(logprobs[i]), reasons[i]) for i in range(choices)]

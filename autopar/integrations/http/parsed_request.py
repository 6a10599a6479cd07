"""What a request asks for: prompts, and how each is continued."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.integrations.http.engine import ServedModel
from autopar.integrations.http.errors import ApiError
from autopar.integrations.http.fields import CHAT, COMPLETIONS, SAMPLING, make_sampling, read_fields
from autopar.integrations.http.grammar import SchemaGrammar
from autopar.integrations.http.prompts import chat_prompt, completion_prompts
from autopar.serving.sampling_params import Sampling
from autopar.spelling import did_you_mean

MOST_CHOICES = 1024  # of one request
COMPLETION_TOKENS = 16  # of /v1/completions without max_tokens, as in OpenAI's API; a chat goes on to max_length


@dataclass(frozen=True)
class ParsedRequest:
    """A request. Choice number p * n + i is the i-th continuation of prompt p."""

    prompts: Sequence[list[int]]
    samplings: Sequence[Sampling]  # per choice
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    echo: bool = False

    @property
    def choices(self) -> int:
        """Their number."""
        return len(self.samplings)


def read_completion(body: Any, served: ServedModel) -> ParsedRequest:
    """A request of /v1/completions. Raises ApiError."""
    fields = read_fields(body, COMPLETIONS)
    _check_model(fields, served)
    if "prompt" not in fields:
        raise ApiError("prompt: needed, found none", param="prompt")
    prompts = completion_prompts(fields["prompt"], served.tokenizer, served.engine.vocabulary)
    if fields.get("echo") and fields.get("logprobs") is not None:
        raise ApiError(
            "echo: not supported with logprobs, since none are computed for the prompt; leave one of them out",
            param="echo",
            code="unsupported_parameter",
        )
    longest = served.engine.max_length - max(map(len, prompts))
    most = min(COMPLETION_TOKENS, max(longest, 1))
    return _parsed(fields, {"max_tokens": most, "logprobs": fields.get("logprobs")}, prompts, served)


def read_chat(body: Any, served: ServedModel) -> ParsedRequest:
    """A request of /v1/chat/completions. Raises ApiError."""
    fields = read_fields(body, CHAT)
    _check_model(fields, served)
    if "max_completion_tokens" in fields:
        fields["max_tokens"] = fields["max_completion_tokens"]
    top = fields.get("top_logprobs")
    if top is not None and not fields.get("logprobs"):
        raise ApiError("top_logprobs: needs logprobs=true", param="top_logprobs")
    prompts = [chat_prompt(fields.get("messages"), served.tokenizer)]
    return _parsed(fields, {"logprobs": (top or 0) if fields.get("logprobs") else None}, prompts, served)


def _check_model(fields: Mapping[str, Any], served: ServedModel) -> None:
    name = fields.get("model", served.name)
    if name != served.name:
        raise unknown_model(name, served)


def unknown_model(name: str, served: ServedModel) -> ApiError:
    """The error for a model that is not served."""
    hint = did_you_mean(name, (served.name,)) or f"; the model is {served.name!r}"
    return ApiError(f"model: {name[:80]!r} is not served here{hint}", 404, "model", "model_not_found")


def _parsed(
    fields: dict[str, Any], own: dict[str, Any], prompts: list[list[int]], served: ServedModel
) -> ParsedRequest:
    given = dict(served.defaults) | own | {name: fields[name] for name in SAMPLING if name in fields}
    first = make_sampling(given)
    _check_ids("logit_bias", first.logit_bias, served.engine.vocabulary)
    _check_ids("stop_token_ids", first.stop_token_ids, served.engine.vocabulary)
    for prompt in prompts:
        _check_length(len(prompt), fields.get("max_tokens"), served.engine.max_length)
    if first.logprobs is not None:
        with contextlib.suppress(ValueError):  # of a slow tokenizer
            _ = served.token_bytes  # made here, in a thread, for the bytes of tokens
    n = fields.get("n", 1)
    if n * len(prompts) > MOST_CHOICES:
        raise ApiError(
            f"n: at most {MOST_CHOICES} choices of all prompts together, found {n * len(prompts)}", param="n"
        )
    grammars = _grammars(fields.get("response_format"), n * len(prompts), served)
    samplings = [
        dataclasses.replace(first, stop=(), grammar=grammar, seed=None if first.seed is None else first.seed + i % n)
        for i, grammar in enumerate(grammars)
    ]
    usage = fields.get("stream_options")
    if usage is not None and not fields.get("stream"):
        raise ApiError("stream_options: needs stream=true", param="stream_options")
    return ParsedRequest(
        prompts, samplings, n, first.stop, fields.get("stream", False), bool(usage), fields.get("echo", False)
    )


def _check_ids(name: str, ids: Any, vocabulary: int) -> None:
    if wrong := [token for token in ids if token >= vocabulary]:
        raise ApiError(f"{name}: expected token ids below {vocabulary}, found {wrong[0]}", param=name)


def _check_length(prompt: int, asked: int | None, most: int) -> None:
    if prompt + (asked or 1) > most:
        raise ApiError(
            f"prompt and max_tokens: at most {most} tokens together, found {prompt} of the prompt and "
            f"{asked or 1} to generate; shorten the prompt, lower max_tokens, or serve with a larger --max-length",
            param="max_tokens" if prompt < most else "prompt",
            code="context_length_exceeded",
        )


def _grammars(schema: Any, count: int, served: ServedModel) -> Sequence[SchemaGrammar | None]:
    if schema is None:
        return [None] * count
    first = SchemaGrammar.of_schema(schema, served)
    return [first, *(first.copy() for _ in range(count - 1))]

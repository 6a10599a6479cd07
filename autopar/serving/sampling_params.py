"""What a request asks for: how its tokens are chosen and when it ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from autopar.errors import refusal_like
from autopar.spelling import did_you_mean
from autopar.values import a_text, number, refuse, whole_number, yes_or_no

_LEAST_TEMPERATURE = 1e-5  # logits divided by less overflow
_OTHER_WORDS = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "bad_words_ids": "bad_words",
    "stop_strings": "stop",
    "eos_token_id": "eos_token_ids",
    "top_logprobs": "logprobs",
    "temp": "temperature",
    "sequence_bias": "logit_bias",
    "logits_processor": "processors",
}


@runtime_checkable
class Grammar(Protocol):
    """The state of one request's grammar. The leader's process alone holds it; ranks receive masks.

    Its methods are called in turn: `bitmask` before a token is chosen, `accept` with the token.
    """

    finished: bool  # whether the text so far is complete and nothing may follow: the request ends with "stop"

    def bitmask(self) -> bytes | None:
        """The ids that may follow: bit i % 8 of byte i // 8 stands for id i (as llguidance and xgrammar write it);
        ids beyond the last byte are forbidden. None: all may follow."""

    def accept(self, token: int) -> None:
        """A token was chosen."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are chosen and when it ends. Fields are given by name.

    temperature: divides the logits; 0 (or below 1e-5, as in vLLM): the most likely token (greedy), and top_k, top_p and
    min_p have no effect.
    top_k: only the k most likely tokens; 0: all. top_p: only the most likely tokens that have this probability
    together. min_p: only tokens of at least this fraction of the highest probability.
    repetition_penalty: divides positive logits, and multiplies negative ones, of the tokens of prompt and generation.
    presence_penalty, frequency_penalty: subtracted from the logit of each generated token, once and as often as it was
    generated (OpenAI's definition; the prompt does not count).
    logit_bias: token id -> number added to its logit; -inf forbids the token.
    bad_words: sequences of token ids that are never generated.
    min_tokens, max_tokens: numbers of tokens to generate; max_tokens None: up to the server's max_length.
    seed: of the random numbers; equal seeds give equal tokens, whatever else is generated. None: the server draws one.
    stop: texts that end the request, and are left out of the result. stop_token_ids: ids that end it.
    eos_token_ids: the model's end of text; None: as the server knows it. ignore_eos: it does not end the request.
    logprobs: None: none; 0: of the chosen tokens; n: of the n most likely ones too. They are of the model's own
    distribution, before temperature, penalties, biases and masks (as in vLLM and OpenAI's API).
    processed_logprobs: they are of the distribution that tokens are drawn from.
    grammar: a `Grammar`, whose masks restrict the tokens. processors: functions (ids [1, length] int64, scores
    [1, vocabulary]) -> scores on the CPU, such as transformers' LogitsProcessors; they see one request alone, run on
    every rank ahead of temperature, and must be picklable and keep no state.

    Raises ValueError for an unknown name or a wrong value.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    processed_logprobs: bool = False
    grammar: Grammar | None = field(default=None, hash=False)
    processors: tuple[Callable[..., Any], ...] = ()

    def __new__(cls, *given: Any, **named: Any) -> Sampling:
        known = [f.name for f in dataclasses.fields(cls)]
        if unknown := [name for name in named if name not in known]:
            hint = did_you_mean(unknown[0], known, _OTHER_WORDS) or f"; name some of {', '.join(known)}"
            raise refusal_like(TypeError(), f"sampling: no such field {unknown[0]!r}{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(f"sampling.{name}", getattr(self, name)))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refuse("sampling.min_tokens", f"at most max_tokens, {self.max_tokens}", self.min_tokens)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen."""
        return self.temperature < _LEAST_TEMPERATURE

    @property
    def needs_history(self) -> bool:
        """Whether a choice depends on the tokens so far."""
        penalties = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return penalties or bool(self.processors) or any(len(word) > 1 for word in self.bad_words)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end the request; `min_tokens` forbids them until then."""
        return self.stop_token_ids + (() if self.ignore_eos else self.eos_token_ids or ())

    def check_ids(self, vocab: int) -> None:
        """Raise ValueError for a bias or a bad word beyond the ids of a model, of which there are ``vocab``."""
        used = {"logit_bias": list(self.logit_bias), "bad_words": [token for word in self.bad_words for token in word]}
        for name, ids in used.items():
            if beyond := [token for token in ids if token >= vocab]:
                raise refuse(f"sampling.{name}", f"token ids below {vocab}, the size of the vocabulary", beyond[0])

    @property
    def sent(self) -> Sampling:
        """What other ranks need: without the grammar, of which they receive masks."""
        return self if self.grammar is None else dataclasses.replace(self, grammar=None)


def _between(least: float, most: float, expected: str, least_too: bool = True) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        found = number(name, value)
        if not (least <= found if least_too else least < found) or not found <= most or math.isinf(found):
            raise refuse(name, expected, value)
        return found

    return check


def _whole(least: float, most: float = math.inf) -> Callable[[str, Any], int]:
    return lambda name, value: whole_number(name, value, least, most)


def _or_none(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise refuse(name, "a sequence of token ids", value)
    return tuple(whole_number(name, token) for token in value)


def _bad_words(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise refuse(name, "a sequence of sequences of token ids", value)
    words = tuple(_ids(name, word) for word in value)
    if () in words:
        raise refuse(name, "sequences of at least one token id", value)
    return words


def _bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise refuse(name, "a mapping of token id to number", value)
    found = {whole_number(name, token): number(name, bias) for token, bias in value.items()}
    if math.inf in found.values():
        raise refuse(name, "numbers below inf", value, "; restrict the tokens by a grammar")
    return found


def _stop(name: str, value: Any) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, (tuple, list)) or "" in given:
        raise refuse(name, "a text or several, none of them empty", value)
    return tuple(a_text(name, text) for text in given)


def _grammar(name: str, value: Any) -> Grammar:
    if not isinstance(value, Grammar):
        raise refuse(name, "an object with bitmask(), accept(token) and finished", value)
    return value


def _processors(name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    if not isinstance(value, (tuple, list)) or not all(map(callable, value)):
        raise refuse(name, "a sequence of functions of ids and scores", value)
    return tuple(value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "temperature": _between(0, math.inf, "a number of at least 0, 0 for greedy"),
    "top_k": _whole(0),
    "top_p": _between(0, 1, "a number above 0 and at most 1", least_too=False),
    "min_p": _between(0, 1, "a number from 0 to 1"),
    "repetition_penalty": _between(0, math.inf, "a number above 0", least_too=False),
    "presence_penalty": _between(-math.inf, math.inf, "a number"),
    "frequency_penalty": _between(-math.inf, math.inf, "a number"),
    "logit_bias": _bias,
    "bad_words": _bad_words,
    "min_tokens": _whole(0),
    "max_tokens": _or_none(_whole(1)),
    "seed": _or_none(_whole(-(2**63), 2**64 - 1)),
    "stop": _stop,
    "stop_token_ids": _ids,
    "eos_token_ids": _or_none(_ids),
    "ignore_eos": yes_or_no,
    "logprobs": _or_none(_whole(0)),
    "processed_logprobs": yes_or_no,
    "grammar": _or_none(_grammar),
    "processors": _processors,
}

"""What the HTTP server needs of the engine that generates, and the model that it serves."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from autopar.integrations.http.errors import ApiError
from autopar.serving.sampling_params import Sampling


class Ticket(Protocol):
    """A request that the engine has taken. Iterating gives its token ids as they are generated, and raises what made
    the engine fail."""

    def __aiter__(self) -> AsyncIterator[int]: ...

    def abort(self) -> None:
        """End it; without effect on one that has ended."""

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", "abort" or "error"; None while it runs."""

    @property
    def logprobs(self) -> Sequence[tuple[float, Sequence[tuple[int, float]]]]:
        """Of each token so far, if they were asked for: its own, and (id, logprob) of the most likely ones."""

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt whose keys were in the cache."""


class Engine(Protocol):
    """The part of `Server` that is used here."""

    def submit(self, prompt_ids: Sequence[int], sampling: Sampling) -> Ticket:
        """Raises QueueFull, or ValueError for a request that can never run."""

    def metrics(self) -> Mapping[str, float]:
        """Numbers by name; those that only grow end in "_total"."""

    @property
    def failure(self) -> str | None:
        """Why it can generate no more, with the name of the rank that has failed; None while it can."""


@dataclass(frozen=True)
class Served:
    """The model that a server serves.

    ``vocabulary``: number of token ids. ``defaults``: fields of `Sampling` that a request leaves out. ``eos``: ids that
    end a text.
    """

    name: str
    engine: Engine
    tokenizer: Any
    vocabulary: int
    max_length: int
    eos: tuple[int, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # One thread: a fast tokenizer may not be used by two at once.
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tokenizer"))

    @functools.cached_property
    def token_bytes(self) -> Any:
        """llguidance's tokenizer, made on first use, which takes a second. Raises ApiError for a slow tokenizer."""
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self.tokenizer, n_vocab=self.vocabulary, eos_token=list(self.eos) or None)
        except ValueError as error:
            raise ApiError(
                f"response_format: needs a tokenizer with a tokenizer.json: {error}", param="response_format"
            ) from error

    def ready(self) -> None:
        """Raises ApiError if the engine has failed."""
        if self.engine.failure:
            raise ApiError(self.engine.failure, status=503, code="engine_failed")

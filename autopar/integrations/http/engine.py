"""The model that the HTTP server serves, and what it needs of the engine that generates: a part of `Server`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from autopar.integrations.http.errors import ApiError
from autopar.serving.metrics import Metrics
from autopar.serving.sampling_params import Sampling
from autopar.serving.ticket import Ticket


class Engine(Protocol):
    """The part of `Server` that is used here."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""

    @property
    def max_length(self) -> int:
        """Most tokens of a request, prompt included."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""

    @property
    def failure(self) -> str | None:
        """The error that ended it; None while it can generate."""

    def submit_all(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        *,
        on_token: Sequence[Callable[[int], bool] | None],
    ) -> Sequence[Ticket]:
        """A request for each prompt, all or none. ``on_token``: called with each token, in a thread of the engine; True
        ends the request with "stop". Raises QueueFull, or ValueError for a request that can never run."""

    def metrics(self) -> Metrics:
        """As they are now."""


@dataclass(frozen=True)
class ServedModel:
    """The model that a server serves. ``defaults``: fields of `Sampling` that a request leaves out.
    ``rank_failure``: which rank has failed, "" for none; an idle engine does not notice it."""

    name: str
    engine: Engine
    tokenizer: Any
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rank_failure: Callable[[], str] = lambda: ""
    # One thread: a fast tokenizer may not be used by two at once.
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tokenizer"))

    @functools.cached_property
    def token_bytes(self) -> Any:
        """llguidance's tokenizer, made on first use, which takes a second. Raises ValueError for a slow tokenizer."""
        from llguidance.hf import from_tokenizer

        eos = list(self.engine.eos_token_ids)
        return from_tokenizer(self.tokenizer, n_vocab=self.engine.vocabulary, eos_token=eos or None)

    @property
    def failure(self) -> ApiError | None:
        """The response to all requests, once a rank or the engine has failed."""
        text = self.rank_failure() or self.engine.failure
        return ApiError(text, status=503, code="engine_failed") if text else None

    def check_ready(self) -> None:
        """Raises ApiError once a rank or the engine has failed."""
        if failure := self.failure:
            raise failure

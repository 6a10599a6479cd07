"""`Request`: one prompt, what it asks for, what was generated so far, and its pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from autopar.serving.sampling_params import Sampling
from autopar.serving.step import Chosen, RowChoice

State = Literal["waiting", "running", "finished"]
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True, eq=False)
class Request:
    """A request. Ids rise with arrival.

    on_token: called on the leader with each token, in order; True: the request ends with "stop". An error of it ends
    this request alone.
    """

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    max_length: int  # of prompt and generated tokens
    sent: Sampling = field(init=False)  # what other ranks need of it
    on_token: Callable[[int], bool] | None = None
    want_logits: bool = False
    want_scores: bool = False

    state: State = "waiting"
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    tokens: list[int] = field(init=False)  # prompt and generated ones
    in_flight: bool = False  # a step that chooses its next token runs
    group: int = 0  # of requests whose steps are in flight together

    # Its place in the cache: written by `PagedCache`, and ``computed`` by `Scheduler`.
    computed: int = 0  # tokens whose keys are in the cache once the planned steps have run
    pages: list[list[int]] = field(default_factory=list)  # per window kind; 0: given back
    tables: tuple[tuple[int, ...], ...] = ()  # the same, for rows
    room: int = 0  # tokens for which the pages of each kind suffice
    shared: int = 0  # pages at the beginning that it found
    prefix: int = 0  # the node of the prefix tree that stands for its first ``remembered`` pages
    remembered: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.sent = self.sampling.sent

    @property
    def generated(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - len(self.prompt)

    def choice(self) -> RowChoice:
        """How its next token is chosen. Raises what its grammar raises."""
        sampling = self.sampling
        return RowChoice(
            self.sent,
            len(self.tokens),
            self.seed,
            len(self.prompt),
            tuple(self.tokens) if sampling.needs_history else (),
            self.generated,
            None if sampling.grammar is None else sampling.grammar.bitmask(),
            self.want_logits,
            self.want_scores,
        )

    def accept(self, chosen: Chosen) -> None:
        """Append a token, and finish where it ends the request."""
        try:
            if chosen.error:
                raise ValueError(chosen.error)
            self.tokens.append(chosen.token)
            reason = self._end(chosen.token)
        except Exception as error:  # a user's function or grammar: it ends this request alone
            reason, self.error = "error", error
        if reason:
            self.finish_reason = reason

    def _end(self, token: int) -> FinishReason | None:
        sampling, grammar = self.sampling, self.sampling.grammar
        if grammar is not None:
            grammar.accept(token)
        stop = self.on_token is not None and self.on_token(token)
        stop = stop or token in sampling.end_ids or (grammar is not None and grammar.finished)
        if stop and self.generated >= sampling.min_tokens:
            return "stop"
        full = len(self.tokens) >= self.max_length
        return "length" if full or self.generated == sampling.max_tokens else None

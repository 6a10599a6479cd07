"""The plainest engine: the model's forward on each request alone, and one `choose` for all that run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.serving.choice import OneRank, choose
from autopar.serving.sampling_params import Sampling
from autopar.serving.step import RowChoice


class ReferenceTicket:
    def __init__(self, engine: ReferenceEngine, prompt: Sequence[int], sampling: Sampling, **more: Any) -> None:
        self.engine, self.prompt, self.sampling = engine, list(prompt), sampling
        self.on_token: Callable[[int], bool] | None = more["on_token"]
        self.want_logits, self.want_scores = more["want_logits"], more["want_scores"]
        self.tokens: list[int] = []
        self.logprobs: list[float | None] = []
        self.logits: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.error: str | None = None
        self.finish_reason: str | None = None

    def choice(self) -> RowChoice:
        sampling = self.sampling
        assert sampling.seed is not None and sampling.eos_token_ids is not None
        history = (*self.prompt, *self.tokens)
        allowed = sampling.grammar.bitmask() if sampling.grammar else None
        return RowChoice(
            sampling.sent,
            len(history),
            sampling.seed,
            len(self.prompt),
            history if sampling.needs_history else (),
            len(self.tokens),
            allowed,
            self.want_logits,
            self.want_scores,
        )

    def end(self, token: int) -> str | None:
        if self.sampling.grammar is not None:
            self.sampling.grammar.accept(token)
        if (self.on_token is not None and self.on_token(token)) or token in self.sampling.end_ids:
            return "stop"
        full = len(self.prompt) + len(self.tokens) == self.engine.max_length
        return "length" if full or len(self.tokens) == self.sampling.max_tokens else None

    def __iter__(self) -> Iterator[int]:
        yield from self.result()

    def result(self) -> list[int]:
        while self.finish_reason is None:
            self.engine.step()
        if self.error is not None:
            raise ValueError(self.error)
        return list(self.tokens)

    def abort(self) -> None:
        self.finish_reason = self.finish_reason or "abort"


class ReferenceEngine:
    def __init__(self, model: torch.nn.Module, vocab: int, max_length: int = 64) -> None:
        self.model, self.vocab, self.max_length = model, vocab, max_length
        self.tickets: list[ReferenceTicket] = []

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_token: Callable[[int], bool] | None = None,
        want_logits: bool = False,
        want_scores: bool = False,
    ) -> ReferenceTicket:
        sampling.check_ids(self.vocab)
        ticket = ReferenceTicket(
            self, prompt, sampling, on_token=on_token, want_logits=want_logits, want_scores=want_scores
        )
        self.tickets.append(ticket)
        return ticket

    @torch.no_grad()
    def step(self) -> None:
        """One token of every request."""
        running = [ticket for ticket in self.tickets if ticket.finish_reason is None]
        texts = [(*ticket.prompt, *ticket.tokens) for ticket in running]
        rows = {text: self.model(torch.tensor([text])).logits[0, -1] for text in set(texts)}
        found = choose(
            torch.stack([rows[text] for text in texts]), [ticket.choice() for ticket in running], OneRank(self.vocab)
        )
        for ticket, chosen in zip(running, found, strict=True):
            if chosen.error is not None:
                ticket.error, ticket.finish_reason = chosen.error, "error"
                continue
            ticket.tokens.append(chosen.token)
            ticket.logprobs.append(chosen.logprob)
            if chosen.logits is not None:
                ticket.logits.append(chosen.logits)
            if chosen.scores is not None:
                ticket.scores.append(chosen.scores)
            ticket.finish_reason = ticket.end(chosen.token)

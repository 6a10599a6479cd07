"""The choices of one request while they are generated: deltas of text as they come, and the end of all that is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass

from autopar.integrations.http.engine import ServedModel
from autopar.integrations.http.errors import ApiError
from autopar.integrations.http.parsed_request import ParsedRequest
from autopar.serving.calls import QueueFull
from autopar.serving.text import TextStream
from autopar.serving.ticket import Ticket


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token, its logarithmic probability, and (id, logprob) of the most likely tokens there."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TextDelta:
    """The next text of a choice. The last one of a choice has a finish_reason, "stop" or "length"."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None


class _StopStrings:
    """Reads the tokens of a choice in the engine's thread, and so ends it at a stop string."""

    def __init__(self, text: TextStream) -> None:
        self._text = text
        self.texts: list[str] = []  # what each token adds

    def __call__(self, token: int) -> bool:
        self.texts.append(self._text.push(token))
        return self._text.stopped


class Generation:
    """The choices of a request, handed to the engine. A context manager: what still runs at its end is aborted."""

    def __init__(self, request: ParsedRequest, served: ServedModel) -> None:
        self.request, self._served = request, served
        self.generated = [0] * request.choices  # tokens of each choice
        self._texts = [
            TextStream(served.tokenizer, request.stop, sampling.min_tokens, request.prompts[i // request.n])
            for i, sampling in enumerate(request.samplings)
        ]
        self._stops = [_StopStrings(text) if request.stop else None for text in self._texts]
        self._tickets: Sequence[Ticket] = ()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Generation:
        """Raises ApiError if the engine does not take the request."""
        self._served.check_ready()
        prompts = [self.request.prompts[i // self.request.n] for i in range(self.request.choices)]
        try:
            self._tickets = self._served.engine.submit_all(prompts, self.request.samplings, on_token=self._stops)
        except Exception as error:
            raise self._api_error(error) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        for ticket in self._tickets:
            ticket.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _api_error(self, error: Exception) -> ApiError:
        """The response to an error of the engine."""
        if isinstance(error, QueueFull):
            return ApiError(str(error), 429, code="queue_full")
        return self._served.failure or ApiError(str(error), 400 if isinstance(error, ValueError) else 500)

    async def deltas(self) -> AsyncIterator[list[TextDelta]]:
        """Deltas of all choices as they come, all that are there at a time. Raises ApiError for one that failed."""
        queue: asyncio.Queue[TextDelta | Exception] = asyncio.Queue()
        self._tasks += [asyncio.create_task(self._follow(i, queue)) for i in range(self.request.choices)]
        running = len(self._tasks)
        while running:
            came = [await queue.get(), *(queue.get_nowait() for _ in range(queue.qsize()))]
            deltas = [delta for delta in came if isinstance(delta, TextDelta)]
            running -= sum(delta.finish_reason is not None for delta in deltas)
            yield deltas
            if error := next((one for one in came if isinstance(one, Exception)), None):
                raise self._api_error(error) from error

    async def _follow(self, choice: int, queue: asyncio.Queue[TextDelta | Exception]) -> None:
        try:
            async with contextlib.aclosing(self._deltas_of(choice)) as deltas:
                async for delta in deltas:
                    queue.put_nowait(delta)
        except Exception as error:
            queue.put_nowait(error)

    async def _deltas_of(self, choice: int) -> AsyncGenerator[TextDelta]:
        ticket, text, stops = self._tickets[choice], self._texts[choice], self._stops[choice]
        pending: list[TokenLogprob] = []
        async for token in ticket:
            at = self.generated[choice]
            self.generated[choice] += 1
            if (logprob := ticket.logprobs[at]) is not None:
                pending.append(TokenLogprob(token, logprob, ticket.top_logprobs[at] or ()))
            if new := text.push(token) if stops is None else stops.texts[at]:
                yield TextDelta(choice, new, tuple(pending))
                pending.clear()
        if ticket.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"the request ended with {ticket.finish_reason!r}")
        yield TextDelta(choice, text.finish(), tuple(pending), ticket.finish_reason)

"""The choices of one request while they are generated: pieces of text as they come, and the end of all that is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from autopar.integrations.http.asked import Asked
from autopar.integrations.http.engine import Served, Ticket
from autopar.integrations.http.errors import ApiError
from autopar.integrations.http.text import TextStream


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token, its logarithmic probability, and (id, logprob) of the most likely tokens there."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """The next text of a choice. The last one of a choice has a finish_reason, "stop" or "length"."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None


class Generation:
    """The choices of a request, handed to the engine. To be closed: it then ends whatever is still generated."""

    def __init__(self, asked: Asked, served: Served) -> None:
        self.asked = asked
        self._served = served
        self.tickets: list[Ticket] = []
        self.generated = [0] * len(asked.choices)  # tokens of each choice
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Generation:
        """Raises ApiError if the engine does not take a choice."""
        self._served.ready()
        try:
            for prompt, sampling in self.asked.choices:
                self.tickets.append(self._served.engine.submit(prompt, sampling))
        except BaseException as error:
            self._abort()
            raise self._as_api_error(error) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        self._abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _abort(self) -> None:
        for ticket in self.tickets:
            ticket.abort()

    def _as_api_error(self, error: BaseException) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if type(error).__name__ == "QueueFull":
            return ApiError(str(error), status=429, code="queue_full")
        self._served.ready()
        return ApiError(str(error), status=400 if isinstance(error, ValueError) else 500)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces of all choices as they come. Raises ApiError when one cannot be generated."""
        queue: asyncio.Queue[Piece | ApiError] = asyncio.Queue()
        self._tasks += [asyncio.create_task(self._follow(i, queue)) for i in range(len(self.tickets))]
        running = len(self._tasks)
        while running:
            piece = await queue.get()
            if isinstance(piece, ApiError):
                raise piece
            running -= piece.finish_reason is not None
            yield piece

    async def _follow(self, choice: int, queue: asyncio.Queue[Piece | ApiError]) -> None:
        try:
            async with contextlib.aclosing(self._pieces_of(choice)) as pieces:
                async for piece in pieces:
                    queue.put_nowait(piece)
        except Exception as error:
            with contextlib.suppress(ApiError):
                error = self._as_api_error(error)
            queue.put_nowait(error if isinstance(error, ApiError) else ApiError(str(error), status=503))

    async def _pieces_of(self, choice: int) -> AsyncGenerator[Piece]:
        ticket, sampling = self.tickets[choice], self.asked.samplings[choice]
        text = TextStream(self._served.tokenizer, self.asked.stop, sampling.min_tokens)
        pending: list[TokenLogprob] = []
        async for token in ticket:
            at = self.generated[choice]
            self.generated[choice] += 1
            if (logprob := ticket.logprobs[at]) is not None:
                pending.append(TokenLogprob(token, logprob, ticket.top_logprobs[at] or ()))
            new = text.push(token)
            if text.stopped:
                ticket.abort()
                yield Piece(choice, new, tuple(pending), "stop")
                return
            if new:
                yield Piece(choice, new, tuple(pending))
                pending.clear()
        if ticket.finish_reason not in ("stop", "length"):
            self._served.ready()
            raise ApiError(f"the request ended with {ticket.finish_reason!r}", status=500)
        rest = text.finish()
        yield Piece(choice, rest, tuple(pending), "stop" if text.stopped else ticket.finish_reason)

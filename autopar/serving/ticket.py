"""`Ticket`: what the caller holds of a request; its tokens come while it runs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from torch import Tensor

from autopar.serving.requests import FinishReason
from autopar.serving.step import Chosen


class Driver(Protocol):
    """What generates the tokens of a ticket: a `Server`."""

    def drive(self, until: Callable[[], bool], timeout: float | None) -> None:
        """Generate in this thread until the condition holds, if no other thread does so."""

    def start(self) -> None:
        """Generate in a thread from now on."""

    def abort(self, request: int) -> None:
        """End a request."""


class Ticket:
    """The tokens of a request as they come: ``for token in ticket`` in any thread, ``async for token in ticket`` in any
    event loop. Each iteration starts with the first token.

    tokens: generated so far, the one that ended it included. logprobs, top_logprobs: of each, if ``Sampling.logprobs``
    asks for them. logits, scores: of each, [vocabulary], if asked for. finish_reason: None while it runs; "stop",
    "length", "abort" or "error", after which iterating and `result` raise ``error``.
    """

    def __init__(self, prompt: Sequence[int], driver: Driver) -> None:
        self.prompt = tuple(prompt)
        self.request: int | None = None  # its id, on rank 0
        self.tokens: list[int] = []
        self.logprobs: list[float | None] = []
        self.top_logprobs: list[tuple[tuple[int, float], ...] | None] = []
        self.logits: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self._driver = driver
        self._changed = threading.Condition()
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    # --- of the loop that generates -------------------------------------------------------------------------------

    def add(self, chosen: Chosen) -> None:
        """One more token."""
        with self._changed:
            self.tokens.append(chosen.token)
            self.logprobs.append(chosen.logprob)
            self.top_logprobs.append(chosen.top)
            if chosen.logits is not None:
                self.logits.append(chosen.logits)
            if chosen.scores is not None:
                self.scores.append(chosen.scores)
            self._wake()

    def finish(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """There are no more tokens. The first call counts."""
        with self._changed:
            if self.finish_reason is None:
                self.finish_reason, self.error = reason, error
                self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        for loop, future in self._sleepers:
            with suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(_awake, future)
        self._sleepers.clear()

    # --- of the caller --------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether it has finished."""
        return self.finish_reason is not None

    def abort(self) -> None:
        """End the request with "abort", soon; what it has generated stays. Without effect once it has finished, and on
        ranks other than 0, which alone decides."""
        if self.request is not None:
            self._driver.abort(self.request)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has finished, for at most ``timeout`` seconds; whether it has. Where this thread drives steps
        with other ranks, there is no time limit."""
        end = None if timeout is None else time.monotonic() + timeout
        self._driver.drive(lambda: self.done, timeout)
        with self._changed:
            return self._changed.wait_for(lambda: self.done, None if end is None else max(0.0, end - time.monotonic()))

    def result(self, timeout: float | None = None) -> list[int]:
        """All its tokens, when it has finished. Raises its error if that ended it, and TimeoutError after ``timeout``
        seconds."""
        if not self.wait(timeout):
            raise TimeoutError(f"serve: the request has not finished after {timeout} s; wait longer, or abort() it")
        self._raise_error()
        return list(self.tokens)

    def __iter__(self) -> Iterator[int]:
        given = 0
        while new := self._behind(given):
            yield from new
            given += len(new)
        self._raise_error()

    def _behind(self, given: int) -> list[int]:
        """The tokens behind so many, when there are any; none: it has finished."""

        def there() -> bool:
            return len(self.tokens) > given or self.done

        self._driver.drive(there, None)
        with self._changed:
            self._changed.wait_for(there)
            return self.tokens[given:]

    async def __aiter__(self) -> AsyncIterator[int]:
        self._driver.start()
        loop, given = asyncio.get_running_loop(), 0
        while True:
            with self._changed:
                new, sleep = self.tokens[given:], None
                if not new and not self.done:
                    sleep = loop.create_future()
                    self._sleepers.append((loop, sleep))
            if sleep is not None:
                await sleep
                continue
            if not new:
                break
            for token in new:
                yield token
            given += len(new)
        self._raise_error()

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error


def _awake(future: asyncio.Future[None]) -> None:
    if not future.done():  # its task may have been cancelled
        future.set_result(None)

"""`Calls`: a rank's calls of `Server.submit` and `Server.generate`, and the tickets of their requests.

Calls are counted on each rank. Rank 0 announces each of its calls, with a hash of the arguments and the ids of its
requests, and later what became of these. A rank that makes the same call gets tickets that are fed from that, whether
it makes it sooner or later; one whose k-th call has other arguments gets an error. A rank in `Server.run` makes no
calls, and ignores announcements.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.serving.requests import FinishReason
from autopar.serving.step import Chosen
from autopar.serving.ticket import Driver, Ticket


class CallRefused(ValueError):
    """None of a call's requests are served."""


class QueueFull(CallRefused):
    """As many requests wait as may; try again later."""


@dataclass(frozen=True)
class Announcement:
    """A call of rank 0."""

    number: int  # of the call, from 1
    digest: bytes  # of its arguments
    requests: tuple[int, ...]  # ids
    asks: bool = False  # whether other ranks have made the same call, before it is served
    error: CallRefused | None = None


@dataclass(frozen=True)
class Event:
    """What became of a request: its next token, or its end."""

    request: int
    chosen: Chosen | None = None
    reason: FinishReason | None = None
    error: Exception | None = None


class Calls:
    """Calls and tickets of one rank. All methods may be called by any thread."""

    def __init__(self, rank: int, driver: Driver) -> None:
        self.rank, self._driver = rank, driver
        self.ignores = False  # announcements of calls that this rank has not made
        self._lock = threading.Lock()
        self._made: dict[int, tuple[bytes, list[Ticket]]] = {}  # not announced yet
        self._announced: dict[int, tuple[Announcement, list[Ticket]]] = {}  # not made yet
        self._tickets: dict[int, Ticket] = {}  # by id of the request

    def hold(self, request: int, prompt: Sequence[int]) -> Ticket:
        """On rank 0: a ticket for a request."""
        ticket = Ticket(prompt, self._driver)
        ticket.request = request
        with self._lock:
            self._tickets[request] = ticket
        return ticket

    def make(self, number: int, digest: bytes, prompts: Sequence[Sequence[int]]) -> list[Ticket]:
        """On other ranks: a call; its tickets, which may be there already."""
        tickets = [Ticket(prompt, self._driver) for prompt in prompts]
        with self._lock:
            announced = self._announced.pop(number, None)
            if announced is None:
                self._made[number] = digest, tickets
                return tickets
            announcement, early = announced
            for ticket, mine in zip(early, tickets):
                ticket.prompt = mine.prompt
            if announcement.digest != digest:
                self._fail(number, tickets)
                return tickets
            return early

    def announced(self, call: Announcement) -> None:
        """On other ranks: rank 0 has made a call."""
        with self._lock:
            digest, tickets = self._made.pop(call.number, (call.digest, None))
            if tickets is None:
                if self.ignores:
                    return
                tickets = [Ticket((), self._driver) for _ in call.requests]
                self._announced[call.number] = call, tickets
            if call.error is not None:
                for ticket in tickets:
                    ticket.finish("error", call.error)
            elif digest != call.digest:
                self._fail(call.number, tickets)
            else:
                self._tickets.update(zip(call.requests, tickets))

    def knows(self, number: int) -> bool:
        """Whether rank 0 has announced a call that this rank has not made yet."""
        with self._lock:
            return number in self._announced

    def agrees(self, number: int, digest: bytes) -> bool | None:
        """Whether this rank has made a call with these arguments; None: it has made none of that number."""
        with self._lock:
            made = self._made.get(number)
        return None if made is None else made[0] == digest

    def _fail(self, number: int, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            ticket.finish("error", differing(number, [self.rank]))

    def deliver(self, events: Iterable[Event]) -> None:
        """Feed tickets; those of other ranks' calls are not here."""
        for event in events:
            with self._lock:
                ticket = self._tickets.get(event.request)
                if event.reason is not None:
                    self._tickets.pop(event.request, None)
            if ticket is not None:
                if event.chosen is not None:
                    ticket.add(event.chosen)
                if event.reason is not None:
                    ticket.finish(event.reason, event.error)

    def finish(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """End all tickets."""
        with self._lock:
            made = [ticket for _, tickets in self._made.values() for ticket in tickets]
            tickets = [*self._tickets.values(), *made]
            self._tickets.clear()
            self._made.clear()
        for ticket in tickets:
            ticket.finish(reason, error)


def differing(number: int, ranks: Sequence[int]) -> CallRefused:
    """The error for a call whose arguments are others on these ranks than on rank 0."""
    named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return CallRefused(
        f"serve: call {number} needs the same requests on all ranks, found others on {named} than on rank 0; make the "
        "same calls on all ranks, or make them on rank 0 alone while the others are in server.run()"
    )

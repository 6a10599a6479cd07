"""`Leader` and `Follower`: what drives the steps of a rank.

The leader (world rank 0) plans a step, sends it to all ranks in one message, and runs its own part; the others run what
they receive, and keep no state of requests. A message also has what became of requests in the steps before (`Event`)
and which calls the leader made (`Announcement`), for ranks that made them, too.

With S pipeline stages, S steps are in flight: step i is of the requests of group i % S; its tokens come back from the
last stage before step i + S is planned. Tokens of other replicas come back in the same way. The leader is ready for
them before it runs its own part. A replica without rows runs the step all the same.

Weights may change while no request runs: before the first step of the next one, all ranks take the present weights.

Neither has a thread: `run` drives it until a condition holds, in whichever thread. Ranks may stop at any message, as
long as all stop at the same one: a condition depends on delivered events alone. An idle leader sends an empty message
every second as long as it is driven.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from autopar.runtime.fault.errors import CollectiveError
from autopar.serving.calls import Announcement, CallRefused, Calls, Event, differing
from autopar.serving.control import LEADER, Control, Expected
from autopar.serving.requests import Request
from autopar.serving.scheduler import Scheduler
from autopar.serving.step import Chosen, Row, Runner, Step, packed_step, unpacked_step

IDLE = 1.0  # seconds between messages of a leader that has nothing to do
X = TypeVar("X")
Y = TypeVar("Y")
Rows = tuple[tuple[Row, ...], ...]


class Message(NamedTuple):
    """What the leader sends."""

    step: Any = None  # of `packed_step`
    events: Sequence[Any] = ()
    calls: Sequence[Announcement] = ()
    ask: Sequence[tuple[int, bytes]] = ()  # calls and the hashes of their arguments: do you make the same ones?
    refresh: bool | None = None  # take the present weights; True: they have changed
    end: str | None = None  # there are no more messages; why, if an error was it


@dataclass
class _Flight:
    """A step that was started."""

    rows: Rows
    chosen: dict[int, list[Chosen] | Expected]  # by replica; of those with a choice


class Leader:
    """The loop of world rank 0.

    deliver: called with the events of each message, before its step runs.
    """

    def __init__(
        self,
        runner: Runner,
        control: Control,
        schedulers: Sequence[Scheduler],
        deliver: Callable[[Sequence[Event]], None],
    ) -> None:
        self._runner, self._control, self._schedulers, self._deliver = runner, control, schedulers, deliver
        self._flights: list[_Flight | None] = [None] * runner.stages
        self._group = 0
        self._inbox: deque[tuple[Announcement, Sequence[Request]] | Callable[[], None]] = deque()
        self._woken = threading.Event()
        self._changed = False  # whether the caller knows that weights have changed
        self.steps = 0
        self.over = False

    # --- from any thread ------------------------------------------------------------------------------------------

    def add(self, call: Announcement, requests: Sequence[Request] = ()) -> None:
        """A call and its requests, for the next step."""
        self._inbox.append((call, requests))
        self._woken.set()

    def abort(self, request: int) -> None:
        """End a request at the next step."""
        self._on_each(lambda scheduler: scheduler.abort(request))

    def weights_changed(self) -> None:
        """Weights have changed, though they do not look like it."""
        self._changed = True

    def _on_each(self, change: Callable[[Scheduler], None]) -> None:
        self._inbox.extend(functools.partial(change, scheduler) for scheduler in self._schedulers)
        self._woken.set()

    def wake(self) -> None:
        """Look at the condition of `run` again."""
        self._woken.set()

    @property
    def waiting(self) -> int:
        """Number of requests that have not begun."""
        new = sum(len(item[1]) for item in tuple(self._inbox) if isinstance(item, tuple))
        return new + sum(len(scheduler.waiting) for scheduler in self._schedulers)

    # --- driving --------------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool]) -> None:
        """Drive steps until the condition holds."""
        while not until():
            if not self._turn():
                self._woken.wait(IDLE)
                if not self._inbox:
                    self._send(Message())
                self._woken.clear()

    def _turn(self) -> bool:
        """Collect the tokens of a group's last step and start its next one. False: there is nothing to do."""
        group, self._group = self._group, (self._group + 1) % len(self._flights)
        events = self._collected(group)
        calls = self._taken(events)
        if any(s.waiting for s in self._schedulers) and self._is_idle:
            self._refresh()
        rows = tuple(scheduler.next_step(group) for scheduler in self._schedulers)
        events += self._ends()
        if any(rows) or events or calls:
            step = packed_step(Step(rows)) if any(rows) and self._control.world > 1 else None
            self._send(Message(step, _packed_events(events), calls), events)
        if any(rows):
            self._flights[group] = self._started(rows)
        return bool(events or calls or any(self._flights) or any(s.unfinished for s in self._schedulers))

    @property
    def _is_idle(self) -> bool:
        """Whether no request runs."""
        return not any(self._flights) and not any(any(scheduler.running) for scheduler in self._schedulers)

    def _refresh(self) -> None:
        """All ranks take the present weights. Prefixes of other weights are forgotten."""
        expected = self._expect_all()
        if expected:
            self._control.broadcast(Message(refresh=self._changed))
        changes = [self._runner.refresh(self._changed), *map(self._report, expected)]
        self._changed = False
        if any(changes):
            for scheduler in self._schedulers:
                scheduler.cache.forget()

    def _expect_all(self) -> list[Expected]:
        """A message of each other rank."""
        return [self._control.expect(rank) for rank in range(self._control.world) if rank != LEADER]

    def _send(self, message: Message, events: Sequence[Event] = ()) -> None:
        if self._control.world > 1:
            self._control.broadcast(message)
        self._deliver(events)

    def _taken(self, events: list[Event]) -> list[Announcement]:
        """Calls since the last message, their requests handed to schedulers; ``events`` gets those of refused ones."""
        items = [self._inbox.popleft() for _ in range(len(self._inbox))]
        calls = [item[0] for item in items if isinstance(item, tuple)]
        errors = self._differing([call for call in calls if call.asks])
        for item in items:
            if not isinstance(item, tuple):
                item()
            elif error := errors.get(item[0].number):
                events += [Event(request.id, None, "error", error) for request in item[1]]
            else:
                for request in item[1]:
                    min(self._schedulers, key=lambda scheduler: scheduler.unfinished).add(request)
        return [replace(call, error=errors.get(call.number, call.error)) for call in calls]

    def _differing(self, calls: Sequence[Announcement]) -> dict[int, CallRefused]:
        """Errors of calls that other ranks make with other arguments, by number."""
        if not calls or self._control.world == 1:
            return {}
        expected = [self._control.expect(rank) for rank in range(self._control.world) if rank != LEADER]
        self._control.broadcast(Message(ask=[(call.number, call.digest) for call in calls]))
        answers = [(one.rank, self._control.received(one)) for one in expected]
        ranks = {call.number: [r for r, said in answers if said[i] is False] for i, call in enumerate(calls)}
        return {number: differing(number, found) for number, found in ranks.items() if found}

    def _started(self, rows: Rows) -> _Flight:
        flight = _Flight(rows, {})
        for replica, reporter in enumerate(self._runner.reporters):
            if reporter != LEADER and _has_choice(rows[replica]):
                flight.chosen[replica] = self._control.expect(reporter)
        self.steps += 1
        mine = self._runner.replica
        chosen = self._runner.run(Step(rows))
        if self._runner.reporters[mine] == LEADER and _has_choice(rows[mine]):
            assert chosen is not None, "a rank of the last stage returns tokens"
            flight.chosen[mine] = chosen
        return flight

    def _collected(self, group: int) -> list[Event]:
        flight, self._flights[group] = self._flights[group], None
        events = list[Event]()
        for replica, chosen in sorted(flight.chosen.items()) if flight else ():
            assert flight is not None
            if isinstance(chosen, Expected):
                chosen = self._report(chosen)
            given = self._schedulers[replica].collect(flight.rows[replica], chosen)
            events += [Event(request.id, one) for request, one in given]
        return events

    def _report(self, expected: Expected) -> Any:
        """What a rank tells. Raises RuntimeError if it has failed."""
        told = self._control.received(expected)
        if isinstance(told, str):
            raise RuntimeError(f"serve: rank {expected.rank} failed in a step: {told}")
        return told

    def _ends(self) -> list[Event]:
        """Of requests that have ended since the last message."""
        events = []
        for scheduler in self._schedulers:
            events += [Event(r.id, None, r.finish_reason, r.error) for r in scheduler.ended]
            scheduler.ended.clear()
        return events

    def end(self) -> None:
        """Abort all requests and tell the others that there are no more messages."""
        events = [event for group in range(len(self._flights)) for event in self._collected(group)]
        calls = self._taken(events)
        for scheduler in self._schedulers:
            scheduler.abort_all()
        events += self._ends()
        self.over = True
        with contextlib.suppress(CollectiveError):  # a rank has left without closing the server
            self._send(Message(None, _packed_events(events), calls, end=""))
        self._deliver(events)

    def restart(self) -> None:
        """Drop what was begun; the schedulers are new."""
        self._flights = [None] * len(self._flights)
        self._inbox.clear()

    def give_up(self, error: BaseException) -> None:
        """Tell the others, if they are there, that this rank has failed."""
        self.over = True
        self._control.try_to_broadcast(Message(end=f"rank {LEADER} failed: {_in_words(error)}"))


class Follower:
    """The loop of another rank."""

    def __init__(self, runner: Runner, control: Control, calls: Calls) -> None:
        self._runner, self._control, self._calls = runner, control, calls
        self.over = False

    def run(self, until: Callable[[], bool]) -> None:
        """Do what the leader says until the condition holds, or there are no more messages. Raises RuntimeError if the
        leader failed."""
        while not self.over and not until():
            message: Message = self._control.receive()
            for call in message.calls:
                self._calls.announced(call)
            self._calls.deliver(_unpacked_events(message.events))
            if message.ask:
                self._control.tell_leader([self._calls.agrees(*call) for call in message.ask])
            if message.refresh is not None:
                self._control.tell_leader(self._or_tell_error(self._runner.refresh, message.refresh))
            if message.step is not None:
                self._run(unpacked_step(message.step))
            if message.end is not None:
                self.over = True
                if message.end:
                    raise RuntimeError(f"serve: {message.end}")
                error = ValueError("serve: rank 0 has closed the server; close it after its last call")
                self._calls.finish("error", error)

    def _run(self, step: Step) -> None:
        mine = self._runner.replica
        reports = self._runner.reporters[mine] == self._control.rank and _has_choice(step.rows[mine])
        if not reports:
            self._runner.run(step)
            return
        chosen = self._or_tell_error(self._runner.run, step)
        assert chosen is not None, "a rank of the last stage returns tokens"
        self._control.tell_leader(chosen)

    def _or_tell_error(self, act: Callable[[X], Y], given: X) -> Y:
        """What the leader waits for: the result, or the error in words."""
        try:
            return act(given)
        except Exception as error:
            self._control.tell_leader(_in_words(error))
            raise

    def give_up(self, error: BaseException) -> None:
        """This rank has failed."""
        self.over = True


def _has_choice(rows: Sequence[Row]) -> bool:
    return any(row.choice is not None for row in rows)


def _packed_events(events: Sequence[Event]) -> list[Any]:
    """As plain tuples, which are quicker to pickle; errors in words, since others may not have their classes."""
    packed: list[Any] = []
    for event in events:
        one = event.chosen
        if one is not None:
            packed.append((event.request, (one.token, one.logprob, one.top, one.logits, one.scores), None, None))
        else:
            text = None if event.error is None else str(event.error)
            packed.append((event.request, None, event.reason, text))
    return packed


def _unpacked_events(packed: Sequence[Any]) -> list[Event]:
    return [
        Event(request, None if one is None else Chosen(*one), reason, None if text is None else ValueError(text))
        for request, one, reason, text in packed
    ]


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

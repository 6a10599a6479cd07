"""Traces of a schedule, simulated or measured, for chrome://tracing and https://ui.perfetto.dev.

    write_trace("step.json", {"simulated": events_of(timeline)}, unit=1e-3)

Events are (rank, action, start, end). One process per run, one thread per rank; transfers that were measured have a
thread of their own, since they run beside the computation. Arrows go from a send to its receive. Modules that were
measured lie within their actions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autopar.schedule.order import BACKWARD, TRANSFERS, Action
from autopar.schedule.simulate import Timeline

Event = tuple[int, Action, float, float]
Span = tuple[str, float, float]  # path of a module, when the host was in it

# Perfetto picks colours by name; these are chrome://tracing's names for blue, green, yellow and purple.
_COLORS = {"F": "thread_state_runnable", "B": "good", "W": "bad", "BW": "rail_response", "BWR": "rail_response"}


def events_of(timeline: Timeline) -> list[Event]:
    """(rank, action, start, end) of everything that takes time."""
    return [
        (rank, action, start, end)
        for rank, actions in enumerate(timeline.order.ranks)
        for action, start, end in zip(actions, timeline.start[rank], timeline.end[rank])
        if end > start
    ]


def measured_events(ranks: Sequence[Iterable[tuple[Action, float, float]]], unit: float = 1.0) -> list[Event]:
    """Events of what each rank recorded, (action, start, end) in seconds of one clock, in units of ``unit`` seconds."""
    return [
        (rank, action, start / unit, end / unit) for rank, actions in enumerate(ranks) for action, start, end in actions
    ]


def chrome_trace(
    runs: Mapping[str, Iterable[Event]],
    unit: float = 1.0,
    modules: Mapping[str, Sequence[Iterable[Span]]] = MappingProxyType({}),
) -> dict[str, Any]:
    """The trace as plain JSON values.

    runs: name, such as "simulated" -> events. unit: seconds per unit of their times. Each run starts at 0. modules: of
    a run, what each rank was in; a span holds those of what is in it.
    """
    out: list[dict[str, Any]] = []
    for process, (name, run) in enumerate(runs.items()):
        events = sorted(run, key=lambda e: (e[0], e[2], e[3]))
        clock = _Clock(min((start for _, _, start, _ in events), default=0.0), unit * 1e6)
        out += _run(process, name, events, clock)
        out += _modules(process, modules.get(name, ()), clock)
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def write_trace(
    file: str | Path,
    runs: Mapping[str, Iterable[Event]],
    unit: float = 1.0,
    modules: Mapping[str, Sequence[Iterable[Span]]] = MappingProxyType({}),
) -> None:
    """Write `chrome_trace` to a file."""
    Path(file).write_text(json.dumps(chrome_trace(runs, unit, modules)) + "\n", encoding="utf-8")


def transfers(events: Iterable[Event]) -> list[tuple[Event, Event]]:
    """(from, to) pairs between ranks.

    Sends and receives where the events have them. Else what must have been sent: a microbatch's forwards follow each
    other along its chain of stages, and so do its backwards.
    """
    events = list(events)
    if any(action.kind in TRANSFERS for _, action, _, _ in events):
        return _sends(events)
    ways: dict[tuple[bool, int, int], list[Event]] = {}
    for event in events:
        action = event[1]
        if action.kind in ("F", *BACKWARD):
            ways.setdefault((action.kind == "F", action.microbatch, action.slice), []).append(event)
    pairs = []
    for way in ways.values():
        way.sort(key=lambda e: (e[2], e[3]))
        pairs += [(one, other) for one, other in pairwise(way) if one[0] != other[0]]
    return pairs


def _sends(events: Sequence[Event]) -> list[tuple[Event, Event]]:
    """(send, receive); where the receive was over before the send (it was only posted), (send, what waited for it)."""

    def way(action: Action, sender: int, receiver: int) -> tuple[Any, ...]:
        return (action.kind[1], sender, receiver, action.microbatch, action.slice)

    received = {way(e[1], e[1].peer, e[1].stage): e for e in events if e[1].kind in ("RF", "RB")}
    users = {(e[1].kind[0], *_unit(e[1])): e for e in events if e[1].kind in ("F", *BACKWARD)}
    pairs = []
    for event in events:
        action = event[1]
        if action.kind in ("SF", "SB"):
            other = received.get(way(action, action.stage, action.peer))
            if other is None or other[3] < event[2]:
                other = users.get((action.kind[1], action.peer, action.microbatch, action.slice))
            pairs += [(event, other)] if other is not None else []
    return pairs


def _unit(action: Action) -> tuple[int, int, int]:
    return (action.stage, action.microbatch, action.slice)


@dataclass(frozen=True)
class _Clock:
    """Times of a run, in microseconds from its start."""

    origin: float
    microseconds: float

    def at(self, time: float) -> float:
        return round((time - self.origin) * self.microseconds, 3)

    def lasts(self, start: float, end: float) -> float:
        return round((end - start) * self.microseconds, 3)


def _modules(process: int, ranks: Sequence[Iterable[Span]], clock: _Clock) -> Iterator[dict[str, Any]]:
    for rank, spans in enumerate(ranks):
        for path, start, end in sorted(spans, key=lambda s: (s[1], -s[2], len(s[0]))):  # outer ones first
            yield {
                "ph": "X", "name": path, "cat": "module", "pid": process, "tid": 2 * rank, "ts": clock.at(start),
                "dur": clock.lasts(start, end),
            }  # fmt: skip


def _run(process: int, name: str, events: Sequence[Event], clock: _Clock) -> Iterator[dict[str, Any]]:
    yield _named("process_name", name, pid=process)
    for thread, label in sorted({_thread(e): _label(e) for e in events}.items()):
        yield _named("thread_name", label, pid=process, tid=thread)
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}}

    for event in events:
        _, action, start, end = event
        facts = {"stage": action.stage, "microbatch": action.microbatch, "slice": action.slice}
        slice_: dict[str, Any] = {
            "ph": "X", "name": str(action), "cat": action.kind, "pid": process, "tid": _thread(event),
            "ts": clock.at(start), "dur": clock.lasts(start, end), "args": facts,
        }  # fmt: skip
        yield slice_ | ({"cname": _COLORS[action.kind]} if action.kind in _COLORS else {})
    for number, (one, other) in enumerate(transfers(events)):
        flow = {"name": str(one[1]), "cat": "transfer", "id": f"{process}.{number}", "pid": process}
        leaves, arrives = _ends(one, other)
        yield flow | {"ph": "s", "tid": _thread(one), "ts": clock.at(leaves)}
        yield flow | {"ph": "f", "bp": "e", "tid": _thread(other), "ts": clock.at(max(leaves, arrives))}


def _ends(one: Event, other: Event) -> tuple[float, float]:
    """Times of an arrow's ends. An end belongs to the slice around it, so it lies just inside: a send that was measured
    takes from its start to the end of the receive; otherwise from the end of one action to the start of the other."""
    leaves = one[2] if one[1].kind in TRANSFERS else one[3] - (one[3] - one[2]) * 1e-3
    arrives = other[3] - (other[3] - other[2]) * 1e-3 if other[1].kind in TRANSFERS else other[2]
    return leaves, arrives


def _thread(event: Event) -> int:
    return 2 * event[0] + (event[1].kind in TRANSFERS)


def _label(event: Event) -> str:
    return f"rank {event[0]}" + (" transfers" if event[1].kind in TRANSFERS else "")


def _named(kind: str, name: str, **where: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, **where, "args": {"name": name}}

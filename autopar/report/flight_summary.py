"""Who waited for whom when a collective failed: read from the files that ranks have written.

rank 0   waits in all_reduce over axis "dp"    for rank 1
rank 1   waits in 1RF0                         for rank 3
rank 3   has written nothing                                    <- what all of them wait for
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx

from autopar.files import opened_plain
from autopar.values import parse, read, refuse, whole_number

LARGEST = 8 << 20  # bytes of a file
OLD = 300.0  # seconds before the newest file: of an earlier failure


@dataclass(frozen=True)
class Event:
    """``what`` a rank did from ``start`` to ``end`` (None: it went on), in seconds since 1970; ``kind`` "wait" for
    other ``ranks``, or "action"."""

    kind: str
    what: str
    start: float
    end: float | None
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Flight:
    """What a rank has written. ``error``: that it met."""

    rank: int
    host: str
    written: float
    error: str
    events: tuple[Event, ...]

    @property
    def last(self) -> Event | None:
        """What went on at the end: the innermost event without an end, else None."""
        return next((event for event in reversed(self.events) if event.end is None), None)

    @property
    def waits(self) -> Event | None:
        return self.last if self.last is not None and self.last.kind == "wait" else None


def read_flights(folder: Path) -> tuple[list[Flight], list[int], list[str]]:
    """(those of the last failure by rank, the ranks whose files are of an earlier one, why others cannot be read).
    Raises ValueError for a folder without a file that can be."""
    files = sorted(folder.glob("rank-*.json")) if folder.is_dir() else []
    if not files:
        raise ValueError(f"flight: expected a folder with files rank-0.json ..., found none in {folder}")
    found, unread = [], []
    for file in files:
        try:
            found.append(_flight(file))
        except ValueError as error:
            unread.append(str(error))
    if not found:
        raise ValueError(unread[0])
    found.sort(key=lambda one: one.rank)
    newest = max(one.written for one in found)
    last, earlier = ([x for x in found if (x.written >= newest - OLD) is wanted] for wanted in (True, False))
    return last, [x.rank for x in earlier], unread


def _flight(file: Path) -> Flight:
    try:
        with opened_plain(file) as handle:
            data = handle.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
        found: Flight = read(Flight, parse(data.decode()), "the file", {float: _seconds, int: _rank})
        return found
    except (OSError, ValueError) as error:
        raise ValueError(f"flight: {file} is no file of a rank: {(str(error).splitlines() or ['?'])[0]}") from None


def _seconds(value: Any, at: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e12:
        raise refuse(at, "seconds", value)
    return float(value)


def _rank(value: Any, at: str) -> int:
    return whole_number(at, value)


def doing(one: Flight) -> tuple[str, str, str]:
    """(what a rank did at the end, for how long, for which ranks it waited)."""
    last = one.last
    if last is None:
        return f"between steps, after {one.events[-1].what}" if one.events else "nothing yet", "", ""
    others = ", ".join(str(rank) for rank in last.ranks if rank != one.rank)
    return (
        f"{'waits in ' if last.kind == 'wait' else 'computes '}{last.what}",
        f"{one.written - last.start:.1f} s",
        others,
    )


def conclusions(flights: Sequence[Flight]) -> list[str]:
    """In sentences, which ranks all others wait for: those that wait for nobody, and those that wait for each other."""
    by_rank = {one.rank: one for one in flights}
    waiting = nx.DiGraph()
    waiting.add_nodes_from(by_rank)
    for one in flights:
        if one.waits is not None:
            waiting.add_edges_from((one.rank, other) for other in _missing(one, by_rank))
    found = []
    for ranks in sorted(map(sorted, nx.attracting_components(waiting))):
        behind = sorted({r for rank in ranks for r in nx.ancestors(waiting, rank)} - {*ranks})
        found.append(_sentence(ranks, behind, by_rank))
    return [text for text in found if text] or [_TOGETHER]


_TOGETHER = "every rank waited in the same exchange: its messages did not arrive"


def _missing(one: Flight, by_rank: Mapping[int, Flight]) -> list[int]:
    """The ranks that it waits for and that are not in the same exchange."""
    assert one.waits is not None
    others = ((rank, by_rank.get(rank)) for rank in one.waits.ranks if rank != one.rank)
    return [r for r, x in others if x is None or x.waits is None or x.waits.what != one.waits.what]


def _sentence(ranks: Sequence[int], behind: Sequence[int], by_rank: Mapping[int, Flight]) -> str:
    waited = f"; {_named(behind)} waited for {'it' if len(ranks) == 1 else 'them'}" if behind else ""
    if len(ranks) > 1:
        return f"{_named(ranks)} waited for each other{waited}"
    one = by_rank.get(ranks[0])
    if one is None:
        return f"{_named(ranks)} has written nothing: it died, was stopped, or its node has another folder{waited}"
    if one.waits is not None:
        return ""  # with the others of its exchange
    return f"{_named(ranks)}, {doing(one)[0]}: {one.error}{waited}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

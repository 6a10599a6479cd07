"""The expected sequence of calls: ranks agree through the store only on calls that are not expected.

    train clip train clip train clip eval train clip       every rank makes the same calls of a model
    ?     ?    ?     .    .     .    ?    ?     .          "?": agreed on through the store

The call that followed the same calls before is expected to follow them again. All ranks have the same expectation,
since it changes only when all agree. So if ranks make different calls, at most one of these is expected. A rank that
makes another one asks all, waits, and sees that the others have gone on: each publishes its place (`Place`) with its
heartbeat.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

PAST = 8  # calls that determine the next one, at most
MOST = 4096  # expectations kept
SHOWN = 4  # models whose places a rank publishes, the last ones used


@dataclass(frozen=True)
class Place:
    """A rank's last call of the model ``name``: its number, and whether it ``meets`` all other ranks there."""

    name: str
    number: int
    meets: bool

    def passed(self, number: int) -> bool:
        """Whether a rank at this place does not meet the others in call ``number``, or has already met them."""
        return self.number > number or (self.number == number and not self.meets)


class Places:
    """The places of this process, by model name."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}

    def be_at(self, place: Place) -> None:
        self._places.pop(place.name, None)
        self._places[place.name] = place  # the last one

    def __str__(self) -> str:
        last = list(self._places.values())[-SHOWN:]  # another thread may add one
        return ";".join(f"{p.name}|{p.number}|{int(p.meets)}" for p in last)

    def beyond(self, other: dict[str, Place]) -> bool:
        """Whether this rank is in a later call than another rank."""
        last = next(reversed(list(self._places.values())), None)
        return last is not None and not last.meets and last.name in other and other[last.name].number < last.number


def places_in(text: str) -> dict[str, Place]:
    """Places by model name, from the text that a rank publishes."""
    found = (one.split("|") for one in text.split(";") if one)
    return {name: Place(name, int(number), meets == "1") for name, number, meets in found}


class CallSequence:
    """The calls of one model. ``name``: its name in the store.

    A call consists of what all ranks compare, such as the shapes of a batch. ``own``: what a rank compares only with
    its own earlier call, such as the names of its stage's gradients.
    """

    def __init__(self, name: str, calls: Places) -> None:
        self._name, self._calls = name, calls
        self.number = 0
        self._numbers: dict[Hashable, int] = {}  # call -> its number
        self._own: dict[int, Hashable] = {}
        self._next: dict[tuple[int, ...], int] = {}
        self._past: tuple[int, ...] | None = ()

    @property
    def past(self) -> str:
        """The last calls as a text: equal on all ranks with the same expectation."""
        return "a call that broke off" if self._past is None else f"{self._past}"

    def expects(self, call: Hashable, own: Hashable = None) -> bool:
        """Whether this call is the expected one on every rank."""
        number, known = self._numbers.get(call, -1), self._known()
        return known >= 0 and self._next[self._last(known)] == number and self._own[number] == own

    def _last(self, count: int) -> tuple[int, ...]:
        past = self._past or ()
        return past[len(past) - count :]

    def _known(self) -> int:
        """The length of the longest suffix of the last calls that has occurred before; -1 if none has."""
        past = self._past
        return -1 if past is None else next((n for n in range(len(past), 0, -1) if self._last(n) in self._next), -1)

    def goes_on(self, call: Hashable) -> None:
        self._be_at(meets=False)
        self._follow(self._numbers[call])

    def meets(self) -> int:
        """Record that this rank meets all others; returns the number of the call."""
        self._be_at(meets=True)
        return self.number

    def agreed(self, call: Hashable, own: Hashable = None) -> None:
        """Record that all ranks make this call: it is expected after these calls from now on."""
        if len(self._next) >= MOST:  # on all ranks
            self.forget()
        if self._past is None:
            self._numbers, self._own, self._next, self._past = {}, {}, {}, ()
        number = self._numbers.setdefault(call, len(self._numbers))
        for count in range(max(self._known(), 1), len(self._past) + 1):  # shorter suffixes keep their expectation
            self._next[self._last(count)] = number
        self._own[number] = own
        self._follow(number)

    def forget(self) -> None:
        """Record that a call broke off: nothing is expected, so ranks agree on the next call."""
        self._past = None

    def _follow(self, number: int) -> None:
        self._past = (*(self._past or ())[1 - PAST :], number)

    def _be_at(self, meets: bool) -> None:
        self.number += 1
        self._calls.be_at(Place(self._name, self.number, meets))

"""Packets of tokens that go round the ranks: what rings of keys and rings of queries share.

A *circulation* sends what each rank owns (its columns or its rows, or the same part of every span of them) round in one
direction. Each span goes only as far as the last rank on its way that needs it; masks by position say who does. That
one rule is all there is. Four ranks, causal, columns, "." where a span is no more:

    contiguous, up                       zigzag chunks (i, 7 - i), down
    rank   0   1   2   3                 rank    0     1     2     3
    hop 0  0   1   2   3                 hop 0  0,7   1,6   2,5   3,4
    hop 1  .   0   1   2                 hop 1  1,6   2,5   3,4   0,.
    hop 2  .   .   0   1                 hop 2  2,5   3,4   0,.   1,.
    hop 3  .   .   .   0                 hop 3  3,4   0,.   1,.   2,.     24 chunks would be a full ring, 18 travel

All ranks compute the same journeys, so both ends of an exchange know what it holds, and what holds nothing is not sent.
Tokens are dim 0 of everything that travels, and spans that leave early stand last: what goes on is a view of what came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from autopar.attention.attend import Attend
from autopar.attention.exchanges import Comm, Like, Pending
from autopar.attention.problem import Problem, Span, Spans
from autopar.ops.kernels import wide


@dataclass(frozen=True)
class Circulation:
    """``what`` ("rows" or "columns") of each rank goes round, ``direction`` 1 (up: to rank + 1) or -1 (down).

    part, parts: of each span, only this one of so many (nearly) equal parts.
    """

    what: str
    direction: int
    part: int = 0
    parts: int = 1

    def cut(self, span: Span) -> Span:
        """The part of a span that travels."""
        size = len(span)
        return Span(span.start + size * self.part // self.parts, span.start + size * (self.part + 1) // self.parts)


@dataclass(frozen=True)
class Trip:
    """A span and, in order, the hops (1 .. ranks - 1) after which it is where it is used."""

    span: Span
    users: tuple[int, ...]


@dataclass(frozen=True)
class Journey:
    """The trips of what one rank owns; those that end first stand last. Spans that nobody else needs have none."""

    trips: tuple[Trip, ...]

    def travelling(self, hop: int) -> Spans:
        """What makes this hop."""
        return tuple(t.span for t in self.trips if hop <= t.users[-1])

    def summed(self, hop: int) -> Spans:
        """Whose gradients make this hop: used before, and to be used again."""
        return tuple(t.span for t in self.trips if t.users[0] < hop <= t.users[-1])

    def used(self, hop: int) -> Spans:
        """What is used after this hop."""
        return tuple(t.span for t in self.trips if hop in t.users)

    def ended(self, hop: int) -> Spans:
        """What is used after this hop for the last time."""
        return tuple(t.span for t in self.trips if hop == t.users[-1])


Choice = Callable[[Journey, int], Spans]  # one of the four above


@lru_cache(maxsize=64)
def journeys(problem: Problem, circulation: Circulation) -> tuple[Journey, ...]:
    """The journey of what each rank owns."""
    ranks = range(problem.size)
    rows, columns = [problem.rows(r) for r in ranks], [problem.columns(r) for r in ranks]
    allows = problem.mask.allows

    def needs(rank: int, span: Span) -> bool:
        if circulation.what == "rows":
            return any(allows(span, c) != "none" for c in columns[rank])
        return any(allows(r, span) != "none" for r in rows[rank])

    def trip(owner: int, span: Span) -> Trip:
        hops = ranks[1:] if len(span) else ()
        return Trip(span, tuple(h for h in hops if needs((owner + circulation.direction * h) % problem.size, span)))

    def journey(owner: int) -> Journey:
        spans = rows[owner] if circulation.what == "rows" else columns[owner]
        trips = [t for t in (trip(owner, circulation.cut(s)) for s in spans) if t.users]
        return Journey(tuple(sorted(trips, key=lambda t: (-t.users[-1], t.users[0]))))

    return tuple(journey(owner) for owner in ranks)


def volume(problem: Problem, circulation: Circulation) -> int:
    """Tokens times hops, over all ranks."""
    return sum(len(t.span) * t.users[-1] for j in journeys(problem, circulation) for t in j.trips)


def shorter(problem: Problem, what: str) -> Circulation:
    """The direction in which less travels; up if both are the same."""
    return min((Circulation(what, 1), Circulation(what, -1)), key=lambda c: volume(problem, c))


# --- packets ---------------------------------------------------------------------------------------------


def runs(home: Spans, spans: Spans) -> list[tuple[int, int]]:
    """Where spans stand in a tensor that holds those of ``home``: (first, length), neighbours joined."""
    found: list[tuple[int, int]] = []
    for span in spans:
        first = 0
        for other in home:
            if other.start <= span.start and span.stop <= other.stop:
                break
            first += len(other)
        else:
            raise AssertionError(f"attention: {span} is in none of {home}")
        first += span.start - other.start
        if found and sum(found[-1]) == first:
            found[-1] = (found[-1][0], found[-1][1] + len(span))
        else:
            found.append((first, len(span)))
    return found


def pick(x: Tensor, home: Spans, spans: Spans) -> Tensor:
    """Of x [tokens at ``home``, ...] the tokens at ``spans``; a view if they are neighbours."""
    pieces = [x.narrow(0, first, length) for first, length in runs(home, spans)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else x[:0]


def tokens_first(*tensors: Tensor) -> Tensor:
    """[B, H, n, *] side by side as one [n, B, H, sum of *]."""
    return (tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)).permute(2, 0, 1, 3)


def heads_first(x: Tensor) -> Tensor:
    """[n, B, H, *] as [B, H, n, *]: a view."""
    return x.permute(1, 2, 0, 3)


def apart(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Views of the two tensors [B, H, n, *] that lie side by side in x; the first is ``width`` wide."""
    x = heads_first(x)
    return x[..., :width], x[..., width:]


@dataclass
class Packet:
    """Some tokens of one rank: contiguous tensors [tokens, ...] that hold ``spans`` one after the other."""

    spans: Spans
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, home: Spans, spans: Spans, *tensors: Tensor) -> Packet:
        """What tensors [tokens at ``home``, ...] hold at ``spans``."""
        return cls(spans, tuple(pick(x, home, spans).contiguous() for x in tensors))

    def take(self, spans: Spans) -> Packet:
        """Some of its spans; a view if they stand together, as the leading ones do."""
        return self if spans == self.spans else Packet(spans, tuple(pick(x, self.spans, spans) for x in self.tensors))

    def zeros(self, dtype: torch.dtype) -> Packet:
        """Zeros for the same tokens."""
        return Packet(self.spans, tuple(x.new_zeros(x.shape, dtype=dtype) for x in self.tensors))

    def add(self, other: Packet) -> None:
        """Add another packet, whose spans are some of this one's."""
        done = 0
        for first, length in runs(self.spans, other.spans):
            for mine, theirs in zip(self.tensors, other.tensors):
                mine.narrow(0, first, length).add_(theirs.narrow(0, done, length))
            done += length


def zero_bias(attend: Attend) -> Tensor | None:
    """Zeros for the gradient of the bias, if it has one."""
    bias = attend.facts.bias
    if bias is None or not attend.problem.bias_gradient:
        return None
    return bias.new_zeros(bias.shape, dtype=wide(bias.dtype))


@dataclass
class Coming:
    """A packet on its way here, and the one that left with it (kept until it has gone)."""

    spans: Spans
    sent: Packet
    pending: Pending | None

    def wait(self) -> Packet:
        """The packet that came."""
        received = self.pending.wait() if self.pending else []
        return Packet(self.spans, tuple(received) or tuple(x[:0] for x in self.sent.tensors))


class Wheel:
    """One rank's end of a circulation. What is here after hop h belongs to rank - direction * h."""

    def __init__(self, circulation: Circulation, problem: Problem, comm: Comm) -> None:
        assert comm.size == problem.size, f"attention: {comm.size} ranks for a problem of {problem.size}"
        self.journeys = journeys(problem, circulation)
        self.direction, self.comm = circulation.direction, comm

    @property
    def own(self) -> Journey:
        """The journey of what this rank owns."""
        return self.journeys[self.comm.rank]

    def _rank(self, distance: int) -> int:
        return (self.comm.rank + self.direction * distance) % self.comm.size

    def at(self, hop: int) -> Journey:
        """The journey of what is here after a hop."""
        return self.journeys[self._rank(-hop)]

    def onward(self, what: str, packet: Packet, hop: int, choice: Choice) -> Coming:
        """Start hop ``hop`` of what is chosen: out of a packet of the owner whose tokens were here before it."""
        sent, spans = packet.take(choice(self.at(hop - 1), hop)), choice(self.at(hop), hop)
        return self._exchange("up" if self.direction > 0 else "down", what, self._rank(1), sent, self._rank(-1), spans)

    def homeward(self, what: str, packet: Packet, hop: int, choice: Choice) -> Coming:
        """Start to send what is chosen of a packet, here after ``hop``, to its owner, and to receive our own that is
        as far away."""
        sent, spans = packet.take(choice(self.at(hop), hop)), choice(self.own, hop)
        return self._exchange("home", what, self._rank(-hop), sent, self._rank(hop), spans)

    def _exchange(self, way: str, what: str, target: int, sent: Packet, source: int, spans: Spans) -> Coming:
        tokens = sum(map(len, spans))
        likes = [Like((tokens, *x.shape[1:]), x.dtype) for x in sent.tensors]
        send = (target, sent.tensors) if sent.spans else None
        receive = (source, likes) if spans else None
        return Coming(spans, sent, self.comm.exchange(way, what, send, receive) if send or receive else None)

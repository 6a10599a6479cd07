"""Packets of tokens that circulate through the ranks: what rings of keys and rings of queries share.

In a *circulation* each rank sends what it owns (its columns or its rows, or the same slice of each of their spans)
around the ring in one direction. A span travels only as far as the last rank that needs it, which follows from masks by
position. Four ranks, causal, columns; "." marks a span that is no longer sent:

    contiguous, up                       zigzag chunks (i, 7 - i), down
    rank   0   1   2   3                 rank    0     1     2     3
    hop 0  0   1   2   3                 hop 0  0,7   1,6   2,5   3,4
    hop 1  .   0   1   2                 hop 1  1,6   2,5   3,4   0,.
    hop 2  .   .   0   1                 hop 2  2,5   3,4   0,.   1,.
    hop 3  .   .   .   0                 hop 3  3,4   0,.   1,.   2,.     24 chunks would be a full ring, 18 travel

Of packed documents only those travel that another rank has a part of, cut at their ends. Where few ranks on the way
need a span, it does not go around: its owner sends it straight to each of them, and its gradients come straight back.

All ranks compute the same journeys (each has all segments), so both ends of an exchange know its contents, and an empty
exchange is skipped.
Tokens are dim 0 of everything that travels. Spans that leave early stand last, so what is sent on is a view.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from autopar.attention.attend import Attend
from autopar.attention.exchanges import Comm, Like, Pending
from autopar.attention.problem import Problem, Span, Spans
from autopar.ops.documents import Documents, Run, Runs
from autopar.ops.kernels import wide


@dataclass(frozen=True)
class Circulation:
    """``what`` ("rows" or "columns") of each rank circulates, ``direction`` 1 (up: to rank + 1) or -1 (down).

    part, parts: which slice of each span circulates, and into how many (nearly) equal slices a span is divided.
    """

    what: str
    direction: int
    part: int = 0
    parts: int = 1

    def cut(self, span: Span) -> Span:
        """The slice of a span that circulates."""
        size = len(span)
        return Span(span.start + size * self.part // self.parts, span.start + size * (self.part + 1) // self.parts)


@dataclass(frozen=True)
class Trip:
    """A span, and the hops (1 .. ranks - 1), in order, after which a rank uses it. straight: its owner sends it to each
    of these ranks, instead of around the ring."""

    span: Span
    users: tuple[int, ...]
    straight: bool = False


@dataclass(frozen=True)
class Journey:
    """The trips of what one rank owns; those that end first stand last. Spans that no other rank needs have no trip."""

    trips: tuple[Trip, ...]

    def travelling(self, hop: int) -> Spans:
        """Spans that are sent on this hop."""
        return tuple(t.span for t in self.trips if not t.straight and hop <= t.users[-1])

    def summed(self, hop: int) -> Spans:
        """Spans whose gradients are sent on this hop: used before it, and used once more after it."""
        return tuple(t.span for t in self.trips if not t.straight and t.users[0] < hop <= t.users[-1])

    def used(self, hop: int) -> Spans:
        """Spans that came around and are used after this hop."""
        return tuple(t.span for t in self.trips if not t.straight and hop in t.users)

    def ended(self, hop: int) -> Spans:
        """Spans that came around and are used for the last time after this hop."""
        return tuple(t.span for t in self.trips if not t.straight and hop == t.users[-1])

    def straight(self, hop: int) -> Spans:
        """Spans that the owner sends straight to the rank that is this many hops away."""
        return tuple(t.span for t in self.trips if t.straight and hop in t.users)


Choice = Callable[[Journey, int], Spans]  # one of the five above


def journeys(problem: Problem, circulation: Circulation, documents: Documents | None = None) -> tuple[Journey, ...]:
    """The journey of what each rank owns."""
    if documents is None:
        return _journeys(problem, circulation)
    return documents.once((problem, circulation), lambda: _of_documents(problem, circulation, documents))


@lru_cache(maxsize=64)
def _journeys(problem: Problem, circulation: Circulation) -> tuple[Journey, ...]:
    def trips(owner: int, span: Span) -> Iterator[Trip]:
        span = circulation.cut(span)
        if users := _users(problem, circulation, owner, span):
            yield Trip(span, users)

    return _all_journeys(problem, circulation, trips)


def _of_documents(problem: Problem, circulation: Circulation, documents: Documents) -> tuple[Journey, ...]:
    """Spans cut where the documents of an example begin or end that reach beyond them: only these have users."""

    def trips(owner: int, span: Span) -> Iterator[Trip]:
        part = circulation.cut(span)
        found = [
            (mine, _users(problem, circulation, owner, mine, Span(run.start, run.stop)))
            for runs in documents.runs
            for run in _reaching(runs, span)
            if len(mine := part & Span(run.start, run.stop))
        ]
        edges = sorted({edge for mine, _ in found for edge in (mine.start, mine.stop)})
        cut = [Span(*pair) for pair in itertools.pairwise(edges)]
        of_each = [tuple(sorted({u for mine, users in found if mine & c == c for u in users})) for c in cut]
        for users, group in itertools.groupby(zip(cut, of_each, strict=True), key=lambda entry: entry[1]):
            together = [c for c, _ in group]
            if users:
                yield Trip(Span(together[0].start, together[-1].stop), users, straight=len(users) < users[-1])

    return _all_journeys(problem, circulation, trips)


def _all_journeys(
    problem: Problem, circulation: Circulation, trips: Callable[[int, Span], Iterable[Trip]]
) -> tuple[Journey, ...]:
    """The journeys of all ranks; ``trips``: of a span of a rank."""

    def journey(owner: int) -> Journey:
        held = problem.rows(owner) if circulation.what == "rows" else problem.columns(owner)
        found = [trip for span in held if len(span) for trip in trips(owner, span)]
        return Journey(tuple(sorted(found, key=lambda t: (-t.users[-1], t.users[0]))))

    return tuple(journey(owner) for owner in range(problem.size))


def _users(
    problem: Problem, circulation: Circulation, owner: int, span: Span, within: Span | None = None
) -> tuple[int, ...]:
    """The hops after which a rank uses a span; ``within``: only what each rank has of these positions counts."""
    allows = problem.mask.allows

    def needs(rank: int) -> bool:
        others = problem.columns(rank) if circulation.what == "rows" else problem.rows(rank)
        others = others if within is None else tuple(part for other in others if len(part := other & within))
        return any((allows(span, o) if circulation.what == "rows" else allows(o, span)) != "none" for o in others)

    return tuple(h for h in range(1, problem.size) if needs((owner + circulation.direction * h) % problem.size))


def _reaching(runs: Runs, span: Span) -> tuple[Run, ...]:
    """The runs that lie in a span and reach beyond it: its first or its last, if any."""
    first = bisect.bisect_right(runs, span.start, key=lambda run: run.stop)
    last = bisect.bisect_left(runs, span.stop, key=lambda run: run.start) - 1
    both = (runs[n] for n in sorted({first, last}) if 0 <= n < len(runs))
    return tuple(run for run in both if run.start < span.start or run.stop > span.stop)


def volume(problem: Problem, circulation: Circulation) -> int:
    """Tokens times hops, summed over all ranks."""
    return sum(len(t.span) * t.users[-1] for j in journeys(problem, circulation) for t in j.trips)


def shorter(problem: Problem, what: str) -> Circulation:
    """The direction that sends less; up if both send the same. Documents send the same in both."""
    return min((Circulation(what, 1), Circulation(what, -1)), key=lambda c: volume(problem, c))


# --- packets ---------------------------------------------------------------------------------------------


def runs(home: Spans, spans: Spans) -> list[tuple[int, int]]:
    """Positions of spans in a tensor that holds those of ``home``: (first, length), neighbours joined."""
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
    """The tokens at ``spans`` of x [tokens at ``home``, ...]; a view if they are adjacent."""
    pieces = [x.narrow(0, first, length) for first, length in runs(home, spans)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else x[:0]


def tokens_first(*tensors: Tensor) -> Tensor:
    """[B, H, n, *] side by side as one [n, B, H, sum of *]."""
    return (tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)).permute(2, 0, 1, 3)


def heads_first(x: Tensor) -> Tensor:
    """[n, B, H, *] as [B, H, n, *]: a view."""
    return x.permute(1, 2, 0, 3)


def apart(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Views of the two tensors [B, H, n, *] that are concatenated in x; the first is ``width`` wide."""
    x = heads_first(x)
    return x[..., :width], x[..., width:]


@dataclass
class Packet:
    """Some tokens of one rank: contiguous tensors [tokens, ...] that hold ``spans`` in order."""

    spans: Spans
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, home: Spans, spans: Spans, *tensors: Tensor) -> Packet:
        """The tokens at ``spans`` of tensors [tokens at ``home``, ...]."""
        return cls(spans, tuple(pick(x, home, spans).contiguous() for x in tensors))

    def take(self, spans: Spans) -> Packet:
        """Some of its spans; a view if they are adjacent, as the leading ones are."""
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
    """Zeros for the gradient of the bias, if the bias has a gradient."""
    bias = attend.facts.bias
    if bias is None or not attend.problem.bias_gradient:
        return None
    return bias.new_zeros(bias.shape, dtype=wide(bias.dtype))


@dataclass
class PendingPacket:
    """A packet that is being received, and the packet sent at the same time, kept alive until it has left."""

    spans: Spans
    sent: Packet
    pending: Pending | None

    def wait(self) -> Packet:
        """The received packet."""
        received = self.pending.wait() if self.pending else []
        return Packet(self.spans, tuple(received) or tuple(x[:0] for x in self.sent.tensors))


class RingRank:
    """One rank's end of a circulation. After hop h this rank has what rank - direction * h owns."""

    def __init__(
        self, circulation: Circulation, problem: Problem, comm: Comm, documents: Documents | None = None
    ) -> None:
        assert comm.size == problem.size, f"attention: {comm.size} ranks for a problem of {problem.size}"
        self.journeys = journeys(problem, circulation, documents)
        self.direction, self.comm = circulation.direction, comm

    @property
    def own(self) -> Journey:
        """The journey of what this rank owns."""
        return self.journeys[self.comm.rank]

    def _rank(self, distance: int) -> int:
        return (self.comm.rank + self.direction * distance) % self.comm.size

    def at(self, hop: int) -> Journey:
        """The journey of what this rank has after a hop."""
        return self.journeys[self._rank(-hop)]

    def onward(self, what: str, packet: Packet, hop: int, choice: Choice) -> PendingPacket:
        """Start hop ``hop``: send the chosen spans of a packet that this rank had before the hop."""
        sent, spans = packet.take(choice(self.at(hop - 1), hop)), choice(self.at(hop), hop)
        return self._exchange("up" if self.direction > 0 else "down", what, self._rank(1), sent, self._rank(-1), spans)

    def homeward(self, what: str, packet: Packet, hop: int, choice: Choice) -> PendingPacket:
        """Start sending the chosen spans of a packet, which this rank has after ``hop``, to their owner, and receiving
        this rank's own spans from as far away."""
        sent, spans = packet.take(choice(self.at(hop), hop)), choice(self.own, hop)
        return self._exchange("home", what, self._rank(-hop), sent, self._rank(hop), spans)

    def outward(self, what: str, home: Spans, hop: int, *tensors: Tensor) -> PendingPacket:
        """Start sending what goes straight to the rank ``hop`` hops away, of tensors [tokens at ``home``, ...], and
        receiving what comes straight from as far away."""
        sent, spans = Packet.of(home, self.own.straight(hop), *tensors), self.at(hop).straight(hop)
        return self._exchange("home", what, self._rank(hop), sent, self._rank(-hop), spans)

    def _exchange(self, way: str, what: str, target: int, sent: Packet, source: int, spans: Spans) -> PendingPacket:
        tokens = sum(map(len, spans))
        likes = [Like((tokens, *x.shape[1:]), x.dtype) for x in sent.tensors]
        send = (target, sent.tensors) if sent.spans else None
        receive = (source, likes) if spans else None
        return PendingPacket(spans, sent, self.comm.exchange(way, what, send, receive) if send or receive else None)

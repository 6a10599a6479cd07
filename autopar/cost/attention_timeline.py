"""How long an attention over ranks takes: the program of each rank (`autopar.attention.program`), simulated on a device
and links.

Each rank runs its program on one stream. An exchange overlaps with it from its start until the rank waits for it. A way
(up, down, home) carries one exchange of a rank at a time, like a communicator's stream; a message starts when both its
ends are ready. A link shares its bandwidth equally among the messages on it, and a message is as fast as its slowest
link.

    link      |----k,v of 0----|----k,v of 3----|
    rank 1    |compute|  wait  |compute|  wait  |compute|         exposed: the time in wait

Collectives move the same bytes as NCCL's rings: in N - 1 hops to the neighbour (mesh: directly to each rank).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from autopar.attention.problem import Problem
from autopar.attention.program import (
    CollectiveEvent,
    ComputeEvent,
    Event,
    ExchangeEvent,
    Trace,
    WaitEvent,
    kernel_flops,
)
from autopar.cost.hardware import Device
from autopar.cost.topology import Link, Topology

CALL = 10e-6  # seconds of a block in addition to its products: launches of the kernel and of merging its result
TILE = 128  # rows and columns of a block at which a kernel reaches half of its speed along each
_CLOSE = 1e-9  # relative: moments that count as equal


@dataclass(frozen=True)
class TimedEvent:
    """An event with its times: of a kernel call, of an exchange or of a collective (from when it moves until it is
    over). what: "compute", a way, or the kind of a collective."""

    rank: int
    what: str
    start: float
    end: float
    event: ComputeEvent | ExchangeEvent | CollectiveEvent


@dataclass(frozen=True)
class AttentionTimeline:
    """One pass of an attention. seconds: until the last rank is done. busy: per rank, the time in which it computes.
    ideal: the allowed pairs split evenly, at full speed, nothing exposed."""

    spans: tuple[TimedEvent, ...] = field(repr=False)
    seconds: float
    busy: tuple[float, ...]
    ideal: float

    @property
    def exposed(self) -> float:
        """Time that the busiest rank waits for exchanges."""
        return self.seconds - max(self.busy)


def efficiency(rows: int, columns: int) -> float:
    """The share of its peak speed that a kernel reaches on a block: a half for each dim of size ``TILE``, towards 1 for
    long ones. A saturating curve that models small blocks; absolute values depend on the kernel."""
    return rows / (rows + TILE) * columns / (columns + TILE)


def compute_seconds(event: ComputeEvent, device: Device, dtype: torch.dtype, backward: bool) -> float:
    """Time of one kernel call."""
    call = max(CALL, device.launch)
    if not event.flops:
        return call
    return call + event.flops / (_speed(device, dtype, backward) * efficiency(event.rows, event.columns))


def _speed(device: Device, dtype: torch.dtype, backward: bool) -> float:
    return device.peak(dtype) * device.attention_share(backward)


def ideal_seconds(problem: Problem, backward: bool, device: Device) -> float:
    """Time of all allowed pairs, split evenly over the ranks, at the device's full speed."""
    pairs = problem.pairs * problem.batch * problem.heads
    return kernel_flops(problem, pairs, backward) / problem.size / _speed(device, problem.dtype, backward)


def play(
    problem: Problem, backward: bool, programs: Sequence[Trace], topology: Topology, device: Device
) -> AttentionTimeline:
    """The timeline of all ranks, or, given fewer programs, of each of these alone: the other ranks are assumed to do
    the same at the same time, which is nearly so if work is split evenly.

    Raises RuntimeError if the ranks deadlock.
    """
    whole = len(programs) == problem.size
    groups = [programs] if whole else [[program] for program in programs]
    spans: list[TimedEvent] = []
    busy: list[float] = []
    for group in groups:
        run = _Playing(
            group, problem.size, topology, lambda event: compute_seconds(event, device, problem.dtype, backward)
        )
        run.finish()
        spans += run.spans
        busy += [run.busy[program.rank] for program in group]
    spans.sort(key=lambda span: (span.start, span.rank))
    seconds = max((span.end for span in spans), default=0.0)
    return AttentionTimeline(tuple(spans), seconds, tuple(busy), ideal_seconds(problem, backward, device))


# --- the simulation --------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Flowing:
    """Bytes on their way over links."""

    route: tuple[Link, ...]
    left: float
    transfer: _Message


@dataclass(eq=False)
class _Message:
    """A message or a collective: it starts when all of ``missing`` have arrived at it, and ends with its last flow."""

    missing: set[int]
    flows: list[tuple[tuple[Link, ...], int]]
    delay: float
    users: list[_Started] = field(default_factory=list)
    running: int = 0
    over: bool = False


@dataclass(eq=False)
class _Started:
    """An exchange or collective of a rank, from its start on."""

    rank: int
    event: ExchangeEvent | CollectiveEvent
    transfers: list[_Message] = field(default_factory=list)
    start: float = math.inf

    @property
    def over(self) -> bool:
        return all(transfer.over for transfer in self.transfers)


Channel = tuple[int, str]  # a rank and a way
Key = tuple[str, tuple[int, ...], int]  # a way or a kind, its ranks (source and target), how many came before


class _Playing:
    """Ranks that run their programs, and the messages between them, in the order of time."""

    def __init__(
        self, programs: Sequence[Trace], size: int, topology: Topology, seconds: Callable[[ComputeEvent], float]
    ) -> None:
        self.size, self.topology, self.seconds = size, topology, seconds
        self.alone = len(programs) == 1
        self.program: Mapping[int, Sequence[Event]] = {p.rank: p.events for p in programs}
        self.position = dict.fromkeys(self.program, 0)
        self.busy = dict.fromkeys(self.program, 0.0)
        self.waits: dict[int, int] = {}  # rank -> number that it waits for
        self.started: dict[tuple[int, int], _Started] = {}
        self.queues: defaultdict[Channel, deque[_Started]] = defaultdict(deque)
        self.counts: defaultdict[tuple[int, str, tuple[int, ...]], int] = defaultdict(int)
        self.transfers: dict[Key, _Message] = {}
        self.flows: list[_Flowing] = []
        self.spans: list[TimedEvent] = []
        self.now = 0.0
        self.later: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()  # ties in time go to the event that was scheduled first

    def finish(self) -> None:
        for rank in self.program:
            self.step(rank)
        while self.later or self.flows:
            rates = self.rates()
            first = min((flow.left / rate for flow, rate in zip(self.flows, rates)), default=math.inf)
            then = min(self.now + first, self.later[0][0] if self.later else math.inf)
            passed, self.now = then - self.now, then
            for flow, rate in zip(self.flows, rates):
                flow.left -= passed * rate
            margin = _CLOSE * then
            done = [flow for flow, rate in zip(self.flows, rates) if flow.left <= rate * margin]
            self.flows = [flow for flow, rate in zip(self.flows, rates) if flow.left > rate * margin]
            for flow in done:
                self.arrived(flow.transfer)
            while self.later and self.later[0][0] <= then + margin:
                heapq.heappop(self.later)[2]()
        if self.waits:
            raise RuntimeError(f"attention: ranks deadlock: {self.stuck()}")

    def rates(self) -> list[float]:
        """Bytes per second of each flow."""
        load: defaultdict[Link, int] = defaultdict(int)
        for flow in self.flows:
            for link in flow.route:
                load[link] += 1
        return [self.topology.bandwidth / max(load[link] for link in flow.route) for flow in self.flows]

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.later, (time, next(self.numbers), action))

    # --- ranks

    def step(self, rank: int) -> None:
        """Run a rank until it computes, waits or is done."""
        events = self.program[rank]
        while self.position[rank] < len(events):
            event = events[self.position[rank]]
            if isinstance(event, WaitEvent):
                if not self.started[rank, event.number].over:
                    self.waits[rank] = event.number
                    return
                self.position[rank] += 1
                continue
            self.position[rank] += 1
            if isinstance(event, ComputeEvent):
                time = self.seconds(event)
                self.busy[rank] += time
                self.spans.append(TimedEvent(rank, "compute", self.now, self.now + time, event))
                self.at(self.now + time, partial(self.step, rank))
                return
            self.start(_Started(rank, event))

    def start(self, new: _Started) -> None:
        """A rank starts an exchange: it runs when the one before it on the same way is over."""
        event = new.event
        self.started[new.rank, event.number] = new
        new.transfers = self.transfers_of(new.rank, event)
        for transfer in new.transfers:
            transfer.users.append(new)
        queue = self.queues[new.rank, _way(event)]
        queue.append(new)
        if len(queue) == 1:
            self.advance(new.rank, _way(event))

    def advance(self, rank: int, way: str) -> None:
        """Start the messages of the first exchange in a queue; remove exchanges that are over."""
        queue = self.queues[rank, way]
        while queue and queue[0].over:
            old = queue.popleft()
            if old.transfers:
                self.spans.append(TimedEvent(rank, way, min(old.start, self.now), self.now, old.event))
        if queue:
            for transfer in queue[0].transfers:
                self.come(transfer, rank)

    def stuck(self) -> str:
        waiting = (f"rank {rank} for {self.started[rank, number].event}" for rank, number in self.waits.items())
        return "; ".join(waiting)

    # --- messages

    def transfers_of(self, rank: int, event: ExchangeEvent | CollectiveEvent) -> list[_Message]:
        """The transfers of an exchange: messages that the other end may already have created, or a collective."""
        if isinstance(event, CollectiveEvent):
            return [self.transfer(rank, event.kind, event.ranks, partial(self.collective, rank, event))]
        messages = [(rank, event.to, event.sent), (event.source, rank, event.received)]
        messages = [(source, target, size) for source, target, size in messages if source >= 0 and target >= 0]
        if self.alone and messages:  # the others do the same: what it sends is also what it receives
            source, target, _ = messages[0]
            messages = [(source, target, max(size for _, _, size in messages))]
        return [
            self.transfer(rank, event.way, (source, target), partial(self.message, event.way, source, target, size))
            for source, target, size in messages
        ]

    def transfer(self, rank: int, way: str, ranks: tuple[int, ...], make: Callable[[], _Message]) -> _Message:
        """The next transfer of a rank on a way among ranks."""
        count = self.counts[rank, way, ranks]
        self.counts[rank, way, ranks] += 1
        key = (way, ranks, count)
        if key not in self.transfers:
            self.transfers[key] = made = make()
            made.missing = {rank} if self.alone else set(ranks)
        return self.transfers[key]

    def message(self, way: str, source: int, target: int, size: int) -> _Message:
        route = self.topology.route(source, target, self.size, way)
        return _Message(set(), [(self.seen(route), size)], self.topology.delay(route))

    def collective(self, rank: int, event: CollectiveEvent) -> _Message:
        """All-to-alls, and all collectives on a mesh, go directly to each rank; the others go around the ring."""
        ranks, hops = event.ranks, len(event.ranks) - 1
        straight = self.topology.kind == "mesh" or event.kind == "all_to_all"
        flows, delay = [], 0.0
        for place, source in enumerate(ranks):
            if self.alone and source != rank:
                continue
            for distance in range(1, hops + 1 if straight else min(2, hops + 1)):
                route = self.topology.route(source, ranks[(place + distance) % len(ranks)], self.size, "up")
                flows.append((self.seen(route), event.block * (1 if straight else hops)))
                delay = max(delay, self.topology.delay(route) * (1 if straight else hops))
        return _Message(set(), flows, delay)

    def seen(self, route: tuple[Link, ...]) -> tuple[Link, ...]:
        """A route as it loads links: if a rank is simulated alone, its own links stand for those of all."""
        return tuple((name, 0) for name, _ in route) if self.alone else route

    def come(self, transfer: _Message, rank: int) -> None:
        """A rank has arrived at its end of a transfer; the last one to arrive starts it."""
        if rank not in transfer.missing:
            return
        transfer.missing.discard(rank)
        if not transfer.missing:
            for user in transfer.users:
                user.start = min(user.start, self.now)
            self.at(self.now + transfer.delay, partial(self.begin, transfer))

    def begin(self, transfer: _Message) -> None:
        """The first bytes arrive."""
        flows = [_Flowing(route, float(size), transfer) for route, size in transfer.flows if size]
        transfer.running = len(flows)
        self.flows += flows
        if not flows:
            self.end(transfer)

    def arrived(self, transfer: _Message) -> None:
        transfer.running -= 1
        if not transfer.running:
            self.end(transfer)

    def end(self, transfer: _Message) -> None:
        transfer.over = True
        for user in transfer.users:
            if user.over:
                self.advance(user.rank, _way(user.event))
                if self.waits.get(user.rank) == user.event.number:
                    del self.waits[user.rank]
                    self.at(self.now, partial(self.step, user.rank))


def _way(event: ExchangeEvent | CollectiveEvent) -> str:
    return event.way if isinstance(event, ExchangeEvent) else event.kind

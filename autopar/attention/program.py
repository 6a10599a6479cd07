"""What one rank does in an attention algorithm: the algorithm's own code, run on tensors without data.

    trace(ALGORITHMS["ring"], problem, backward=False, rank=0)

    -> [Exchange("up", "k,v", to 1, from 3), Compute(rows of 0, columns of 0), Wait, Compute(... of 3), ...]

Receives return empty meta tensors of the announced shape, so what is counted is what runs. Exchanges of heads for
sequence around an algorithm are events, too (`AttentionAlgorithm.head_ranks`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from autopar.attention.algorithm import AttentionAlgorithm
from autopar.attention.attend import Attend, Gradients, KernelCall, Partials
from autopar.attention.exchanges import Comm, Expected, Pending, Sent
from autopar.attention.problem import Problem, Spans, inner_problem, kv_repeats
from autopar.ops.kernels import wide
from autopar.ops.mask_spec import MaskSpec

WHOLE = 8  # up to this many ranks, all are traced


@dataclass(frozen=True)
class ComputeEvent:
    """One kernel call on ``rows`` and ``columns``. pairs: allowed (query, key) pairs, per example and head. flops: of
    all examples and heads. queries_of, keys_of: the ranks that own them (-1: several)."""

    rows: int
    columns: int
    pairs: int
    flops: int
    backward: bool = False
    queries_of: int = -1
    keys_of: int = -1


@dataclass(frozen=True)
class ExchangeEvent:
    """The start of `Comm.exchange`: bytes to rank ``to`` and from rank ``source`` (-1: none)."""

    number: int
    way: str
    what: str
    to: int
    sent: int
    source: int
    received: int


@dataclass(frozen=True)
class CollectiveEvent:
    """The start of "all_gather", "reduce_scatter" or "all_to_all" among ``ranks``. block: bytes that each of them sends
    to each other one."""

    number: int
    kind: str
    what: str
    block: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class WaitEvent:
    """The rank waits here until the exchange or collective with this number has ended."""

    number: int


Event = ComputeEvent | ExchangeEvent | CollectiveEvent | WaitEvent


@dataclass(frozen=True)
class Trace:
    """What a rank does, in order."""

    rank: int
    events: tuple[Event, ...]

    @property
    def moved(self) -> dict[str, tuple[int, int]]:
        """Number of exchanges that send something and bytes that leave the rank, by way or kind of collective."""
        found: dict[str, tuple[int, int]] = {}
        for event in self.events:
            if isinstance(event, ExchangeEvent):
                way, size = event.way, event.sent
            elif isinstance(event, CollectiveEvent):
                way, size = event.kind, event.block * (len(event.ranks) - 1)
            else:
                continue
            if size:
                calls, before = found.get(way, (0, 0))
                found[way] = calls + 1, before + size
        return found

    @property
    def sent(self) -> dict[str, int]:
        """The bytes of `moved`."""
        return {way: size for way, (_, size) in self.moved.items()}

    @property
    def pairs(self) -> tuple[int, ...]:
        """Allowed pairs of its kernel calls between consecutive waits, where there are any."""
        found = [0]
        for event in self.events:
            if isinstance(event, WaitEvent):
                found.append(0)
            elif isinstance(event, ComputeEvent):
                found[-1] += event.pairs
        return tuple(filter(None, found))

    @property
    def steps(self) -> int:
        """How often it waits for an exchange that moves bytes."""
        moving = {
            e.number
            for e in self.events
            if (isinstance(e, ExchangeEvent) and e.sent + e.received) or (isinstance(e, CollectiveEvent) and e.block)
        }
        return sum(isinstance(e, WaitEvent) and e.number in moving for e in self.events)


@lru_cache(maxsize=4096)
def trace(
    algorithm: AttentionAlgorithm, problem: Problem, backward: bool, rank: int, heads: int | None = None
) -> Trace:
    """Run one pass of an algorithm for one of ``problem.size`` ranks. The algorithm must not refuse the problem.

    heads: how many neighbours exchange heads around it; None: the algorithm's own choice.
    """
    heads = algorithm.head_ranks(problem) if heads is None else heads
    inner = inner_problem(problem, heads)
    outer, place = divmod(rank, heads)
    comm = RecordingComm(outer, inner.size)
    attend = RecordingAttend(inner, _facts(inner, outer), outer, comm)
    q, k, v, out, lse = _operands(inner, outer)
    if backward:
        algorithm.backward(out, q, k, v, out, lse, attend, comm)
    else:
        algorithm.forward(q, k, v, attend, comm)
    events = [_among_all(event, heads, place) for event in comm.events]
    if heads > 1:
        before, after = _head_exchanges(problem, heads, outer, backward)
        events = [*before, *events, *after]
    return Trace(rank, tuple(events))


def sampled(problem: Problem) -> Sequence[int]:
    """The ranks that represent all: up to `WHOLE`, each of them; of more, the first two, the middle and the last, but
    with documents all."""
    ranks = problem.size
    return range(ranks) if ranks <= WHOLE or problem.documents else (0, 1, ranks // 2, ranks - 1)


def kernel_flops(problem: Problem, pairs: int, backward: bool) -> int:
    """Operations on ``pairs`` allowed (query, key) pairs, over all examples and heads; see `autopar.cost.flops`."""
    of_query, of_value = (3, 2) if backward else (1, 1)
    return 2 * pairs * (of_query * problem.width + of_value * problem.value_width)


# --- stand-ins for what runs -----------------------------------------------------------------------------


@dataclass
class _OnItsWay(Pending):
    """Returns what was announced, and records the wait."""

    comm: RecordingComm
    number: int
    tensors: list[Tensor]

    def wait(self) -> list[Tensor]:
        self.comm.events.append(WaitEvent(self.number))
        return self.tensors


class RecordingComm(Comm):
    """A `Comm` that sends nothing and records everything."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.events: list[Event] = []
        self._started = 0

    def exchange(self, way: str, what: str, send: Sent | None, receive: Expected | None) -> Pending:
        to, sent = send if send is not None else (-1, ())
        source, likes = receive if receive is not None else (-1, ())
        for peer in (to, source):
            assert peer == -1 or (0 <= peer < self.size and peer != self.rank), f"rank {self.rank} and peer {peer}"
        number = self._next()
        come = [torch.empty(like.shape, dtype=like.dtype, device="meta") for like in likes]
        self.events.append(ExchangeEvent(number, way, what, to, _nbytes(sent), source, _nbytes(come)))
        return _OnItsWay(self, number, come)

    def all_gather(self, what: str, x: Tensor) -> Pending:
        return self._collective("all_gather", what, _nbytes([x]), x.new_empty((self.size, *x.shape)))

    def reduce_scatter(self, what: str, x: Tensor) -> Pending:
        assert x.shape[0] == self.size, f"reduce_scatter of {tuple(x.shape)} among {self.size} ranks"
        return self._collective("reduce_scatter", what, _nbytes([x[0]]), x.new_empty(x.shape[1:]))

    def _collective(self, kind: str, what: str, block: int, result: Tensor) -> Pending:
        number = self._next()
        self.events.append(CollectiveEvent(number, kind, what, block, tuple(range(self.size))))
        return _OnItsWay(self, number, [result])

    def _next(self) -> int:
        self._started += 1
        return self._started - 1


class RecordingAttend(Attend):
    """Records every kernel call with the owners of its rows and columns; computes nothing."""

    def __init__(self, problem: Problem, facts: MaskSpec, rank: int, comm: RecordingComm) -> None:
        super().__init__(problem, facts, rank, self._record)
        self._comm, self._owners = comm, (-1, -1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Spans, columns: Spans, into: Partials) -> None:
        self._calls(rows, columns, backward=False)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        rows: Spans,
        columns: Spans,
        into: Gradients,
    ) -> None:
        self._calls(rows, columns, backward=True)

    def _calls(self, rows: Spans, columns: Spans, backward: bool) -> None:
        self._owners = _owners(self.problem, rows, columns)
        for block in self._blocks(rows, columns):
            self._tell(block, backward)

    def _record(self, work: KernelCall) -> None:
        operations = kernel_flops(self.problem, work.pairs * work.examples * work.heads, work.backward)
        self._comm.events.append(
            ComputeEvent(work.rows, work.columns, work.pairs, operations, work.backward, *self._owners)
        )


@lru_cache(maxsize=4096)
def _owners(problem: Problem, rows: Spans, columns: Spans) -> tuple[int, int]:
    """The ranks that rows and columns belong to."""
    return _owner(rows, [problem.rows(r) for r in range(problem.size)]), _owner(
        columns, [problem.columns(r) for r in range(problem.size)]
    )


def _owner(spans: Spans, held: Sequence[Spans]) -> int:
    def inside(mine: Spans) -> bool:
        return all(any(m.start <= s.start and s.stop <= m.stop for m in mine) for s in spans)

    return next((rank for rank, mine in enumerate(held) if inside(mine)), -1)


def _operands(problem: Problem, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, out and lse of a rank, without data."""
    rows, columns = (sum(map(len, spans)) for spans in (problem.rows(rank), problem.columns(rank)))
    p = problem

    def empty(*shape: int, dtype: torch.dtype = p.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return (
        empty(p.batch, p.heads, rows, p.width),
        empty(p.batch, p.kv_heads, columns, p.width),
        empty(p.batch, p.kv_heads, columns, p.value_width),
        empty(p.batch, p.heads, rows, p.value_width),
        empty(p.batch, p.heads, rows, dtype=wide(p.dtype)),
    )


def _facts(problem: Problem, rank: int) -> MaskSpec:
    """Masks and biases of the problem's kinds, without data."""
    p, rows = problem, sum(map(len, problem.rows(rank)))

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    bias = empty(1, p.heads, rows if p.bias == "rows" else 1, p.keys, dtype=p.dtype) if p.bias else None
    return MaskSpec(
        bias=bias,
        key_mask=empty(p.batch, p.keys, dtype=torch.bool) if p.key_mask else None,
        segments=empty(p.batch, p.keys, dtype=torch.int64) if p.segments else None,
        sinks=empty(p.heads, dtype=p.dtype) if p.sinks else None,
        seed=empty(dtype=torch.int64) if p.dropout else None,
        causal=p.mask.causal,
        window=p.mask.window,
        chunk=p.mask.chunk,
        offset=0,
        scale=p.width**-0.5,
        softcap=p.softcap,
        dropout=p.dropout,
        site=0,
        index=(),
        shape=(),
    )


# --- heads for sequence ------------------------------------------------------------------------------------


def _among_all(event: Event, heads: int, place: int) -> Event:
    """An event among every ``heads``-th rank, with the ranks' coordinates on the whole axis."""
    if heads == 1:
        return event

    def on_axis(rank: int) -> int:
        return rank if rank < 0 else rank * heads + place

    if isinstance(event, ExchangeEvent):
        return replace(event, to=on_axis(event.to), source=on_axis(event.source))
    if isinstance(event, CollectiveEvent):
        return replace(event, ranks=tuple(map(on_axis, event.ranks)))
    if isinstance(event, ComputeEvent):
        return replace(event, queries_of=on_axis(event.queries_of), keys_of=on_axis(event.keys_of))
    return event


def _head_exchanges(problem: Problem, heads: int, outer: int, backward: bool) -> tuple[list[Event], list[Event]]:
    """All-to-alls among ``heads`` neighbours before and after: q, k, v and out; the gradient of out and those of q, k,
    v. Key heads are repeated until every rank has some."""
    p = problem
    group = tuple(range(outer * heads, (outer + 1) * heads))
    rows, columns = p.queries // p.size, p.keys // p.size
    times = kv_repeats(p.heads, p.kv_heads, heads)
    q, out = (p.batch * p.heads * rows * width * p.dtype.itemsize for width in (p.width, p.value_width))
    k, v = (p.batch * p.kv_heads * times * columns * width * p.dtype.itemsize for width in (p.width, p.value_width))

    before: dict[str, int] = {"dout": out} if backward else {"q": q, "k": k, "v": v}
    after: dict[str, int] = {"dq": q, "dk": k, "dv": v} if backward else {"out": out}

    def exchanges(sizes: Mapping[str, int], first: int) -> list[Event]:
        found: list[Event] = []
        for number, (what, size) in enumerate(sizes.items(), first):
            found += [CollectiveEvent(number, "all_to_all", what, size // heads, group), WaitEvent(number)]
        return found

    return exchanges(before, -len(before) - len(after)), exchanges(after, -len(after))


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors)


def most_moved(found: Sequence[Trace]) -> dict[str, tuple[int, int]]:
    """By way: the most exchanges and bytes that a rank sends."""
    most: dict[str, tuple[int, int]] = {}
    for each in found:
        for way, (calls, size) in each.moved.items():
            most[way] = max(most.get(way, (0, 0)), (calls, size), key=lambda entry: entry[1])
    return most

"""Attention over ranks in one process: a thread per rank, and exchanges that are checked and counted.

    run(4, lambda comm: algorithm.forward(*pieces[comm.rank], attends[comm.rank], comm))
    attend_and_differentiate("ring", "token_ring", case)        whole tensors in, whole results out
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from autopar.attention import (
    ALGORITHMS,
    Gradients,
    Like,
    Pending,
    Problem,
    Spans,
    inner_problem,
    kv_repeats,
)
from autopar.ops.attend import Attend, wide
from autopar.ops.attention import Facts
from autopar.passes import attention as attention  # fills ALGORITHMS

T = TypeVar("T")
Line = tuple[int, int, str, int]  # source, target, way, number: the way of one message
PATIENCE = 20.0  # seconds that a rank waits for another before it is an error


class Stopped(Exception):
    """Another rank failed."""


class Switch:
    """What all ranks share: letters in order per line, such as (source, target, way)."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.lines: dict[object, deque[list[Tensor]]] = {}
        self.failed = False

    def put(self, line: object, letter: list[Tensor]) -> None:
        with self.changed:
            self.lines.setdefault(line, deque()).append(letter)
            self.changed.notify_all()

    def get(self, line: object) -> list[Tensor]:
        """The next letter of a line. Raises TimeoutError if none comes."""
        with self.changed:
            come = self.changed.wait_for(lambda: self.failed or self.lines.get(line), PATIENCE)
            if self.failed:
                raise Stopped
            if not come:
                raise TimeoutError(f"deadlock: nothing comes on {line}")
            return self.lines[line].popleft()

    def fail(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()


@dataclass
class Sent:
    """One message: what, by which way, to whom, and its bytes."""

    way: str
    what: str
    target: int
    bytes: int


class ThreadComm:
    """A `Comm` whose ranks are threads. A send is over when its receiver has asked for it, as with a real network.

    sent: its messages, collectives among them with the bytes that a ring would send. events: the exchanges started
    ("start") and waited for ("wait"), and whatever else a test adds. most_received: of one message, in bytes.
    """

    def __init__(self, rank: int, size: int, switch: Switch) -> None:
        self.rank, self.size, self.switch = rank, size, switch
        self.sent: list[Sent] = []
        self.events: list[object] = []
        self.started: Counter[tuple[object, ...]] = Counter()
        self.most_received = 0
        self.waiting = 0

    def exchange(
        self,
        way: str,
        what: str,
        send: tuple[int, Sequence[Tensor]] | None,
        receive: tuple[int, Sequence[Like]] | None,
    ) -> Pending:
        assert way in ("up", "down", "home"), way
        assert send or receive, "an exchange of nothing"
        step = {"up": 1, "down": -1}
        letter = request = None
        if send:
            target, tensors = send
            assert way == "home" or target == (self.rank + step[way]) % self.size
            assert target != self.rank and sum(x.numel() for x in tensors), f"{what}: nothing to send"
            assert all(x.is_contiguous() for x in tensors), f"{what} is not contiguous"
            self.sent.append(Sent(way, what, target, sum(x.nbytes for x in tensors)))
            letter = self._line(self.rank, target, way)
            self.switch.put(letter, [x.clone() for x in tensors])
        if receive:
            assert way == "home" or receive[0] == (self.rank - step[way]) % self.size
            request = self._line(receive[0], self.rank, way)
            self.switch.put((*request, "asked for"), [])
        self.events.append("start")
        self.waiting += 1
        return _Exchange(self, what, send, letter, receive, request)

    def _line(self, source: int, target: int, way: str) -> Line:
        """A line for the next message: those of a pair and a way are matched by the order in which they start."""
        self.started[source, target, way] += 1
        return source, target, way, self.started[source, target, way]

    def all_gather(self, what: str, x: Tensor) -> Pending:
        self.sent.append(Sent("all_gather", what, -1, (self.size - 1) * x.nbytes))
        return _Collective(self, [x] * self.size, lambda pieces: torch.stack(pieces))

    def reduce_scatter(self, what: str, x: Tensor) -> Pending:
        assert x.shape[0] == self.size
        self.sent.append(Sent("reduce_scatter", what, -1, (self.size - 1) * x[0].nbytes))
        return _Collective(self, list(x), lambda pieces: torch.stack(pieces).sum(0))

    def bytes(self, *ways: str) -> int:
        """Sent by one or more ways."""
        return sum(s.bytes for s in self.sent if s.way in ways)

    def messages(self, *ways: str) -> int:
        """How many were sent."""
        return sum(s.way in ways for s in self.sent)

    def arrived(self, letter: list[Tensor]) -> list[Tensor]:
        self.waiting -= 1
        self.events.append("wait")
        self.most_received = max(self.most_received, sum(x.nbytes for x in letter))
        return letter


class _Exchange:
    def __init__(
        self,
        comm: ThreadComm,
        what: str,
        send: tuple[int, Sequence[Tensor]] | None,
        letter: Line | None,
        receive: tuple[int, Sequence[Like]] | None,
        request: Line | None,
    ) -> None:
        self.comm, self.what, self.letter, self.request = comm, what, letter, request
        self.likes = list(receive[1]) if receive else []
        self.sent = list(send[1]) if send else []
        self.before = [x.clone() for x in self.sent]

    def wait(self) -> list[Tensor]:
        found = self.comm.switch.get(self.request) if self.request else []
        likes = [Like(tuple(x.shape), x.dtype) for x in found]
        assert likes == self.likes, f"{self.what}: {likes} came on {self.request}, {self.likes} were to come"
        if self.letter:
            self.comm.switch.get((*self.letter, "asked for"))
        for now, before in zip(self.sent, self.before, strict=True):
            assert torch.equal(now, before), f"{self.what} changed while it was sent"
        return self.comm.arrived(found)


class _Collective:
    """Everybody sends to everybody, itself included."""

    def __init__(self, comm: ThreadComm, pieces: list[Tensor], join: Callable[[list[Tensor]], Tensor]) -> None:
        self.comm, self.join = comm, join
        comm.started["collective",] += 1
        self.number = comm.started["collective",]
        comm.waiting += 1
        comm.events.append("start")
        for target, piece in enumerate(pieces):
            comm.switch.put((comm.rank, target, self.number), [piece.clone()])

    def wait(self) -> list[Tensor]:
        comm = self.comm
        pieces = [comm.switch.get((source, comm.rank, self.number))[0] for source in range(comm.size)]
        return comm.arrived([self.join(pieces)])


def run(size: int, fn: Callable[[ThreadComm], T]) -> tuple[list[T], list[ThreadComm]]:
    """What ``fn`` gives on each rank, and what the ranks sent. The error of a rank is raised here."""
    switch = Switch()
    comms = [ThreadComm(rank, size, switch) for rank in range(size)]
    results: dict[int, T] = {}
    errors: dict[int, Exception] = {}

    def work(comm: ThreadComm) -> None:
        try:
            results[comm.rank] = fn(comm)
            assert not comm.waiting, f"rank {comm.rank} did not wait for {comm.waiting} exchanges"
        except Exception as error:
            errors[comm.rank] = error
            switch.fail()

    threads = [threading.Thread(target=work, args=(comm,), daemon=True) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE)
    for error in sorted(errors.values(), key=lambda e: isinstance(e, Stopped)):
        raise error
    assert len(results) == size, "a rank does not end"
    left = {line for line, letters in switch.lines.items() if letters}
    assert not left, f"sent and never received: {left}"
    return [results[rank] for rank in range(size)], comms


# --- whole problems --------------------------------------------------------------------------------------


@dataclass
class Case:
    """A problem and, whole, its tensors and the gradient of its output."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    facts: Facts

    @classmethod
    def of(cls, problem: Problem, seed: int = 0) -> Case:
        """Random numbers for a problem. Documents are of uneven lengths; one example has no key at all if there is a
        key mask. A bias of rows is [1, Hq, Sq, Sk], one of columns [B, 1, 1, Sk]."""
        p, draw = problem, torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64).to(p.dtype)

        q, grad = random(p.batch, p.heads, p.queries, p.width), random(p.batch, p.heads, p.queries, p.value_width)
        k, v = random(p.batch, p.kv_heads, p.keys, p.width), random(p.batch, p.kv_heads, p.keys, p.value_width)
        shapes = {"rows": (1, p.heads, p.queries, p.keys), "columns": (p.batch, 1, 1, p.keys)}
        key_mask = torch.rand((p.batch, p.keys), generator=draw) > 0.3
        key_mask[0] = False
        facts = Facts(
            bias=random(*shapes[p.bias]) if p.bias else None,
            key_mask=key_mask if p.key_mask else None,
            segments=(torch.rand((p.batch, p.keys), generator=draw) > 0.8).cumsum(-1) if p.segments else None,
            sinks=random(p.heads) if p.sinks else None,
            seed=torch.tensor(7) if p.dropout else None,
            causal=p.mask.causal,
            window=p.mask.window,
            chunk=p.mask.chunk,
            offset=0,
            scale=p.width**-0.5,
            softcap=p.softcap,
            dropout=p.dropout,
            site=3,
            index=[],
            shape=[],
        )
        return cls(p, q, k, v, grad, facts)


@dataclass
class Result:
    """Whole results, in the dtype in which they were summed; and the ranks of forward and backward (those of the
    first group of heads, if heads are exchanged for sequence)."""

    out: Tensor
    lse: Tensor
    gradients: Gradients
    forward: list[ThreadComm] = field(default_factory=list)
    backward: list[ThreadComm] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        """out, lse and all gradients."""
        found = self.gradients
        return [self.out, self.lse, found.q, found.k, found.v] + ([] if found.bias is None else [found.bias])


def on_the_whole(case: Case) -> Result:
    """The same by the operator on whole tensors."""
    facts = [getattr(case.facts, f.name) for f in dataclasses.fields(Facts) if f.name != "mask"]
    out, lse = torch.ops.autopar.attention(case.q, case.k, case.v, *facts)
    *found, _ = torch.ops.autopar.attention_backward(
        case.grad, case.q, case.k, case.v, out, lse, *facts, case.problem.bias_gradient
    )
    return Result(out, lse, Gradients(*found[:3], bias=found[3] if case.problem.bias_gradient else None))


def cut(x: Tensor, spans: Spans, dim: int = 2) -> Tensor:
    """A rank's part of a whole tensor."""
    return torch.cat([x.narrow(dim, s.start, len(s)) for s in spans], dim)


def add(x: Tensor, part: Tensor, spans: Spans, dim: int = 2) -> None:
    """Add a rank's part to a whole tensor."""
    for span, piece in zip(spans, part.split([len(s) for s in spans], dim), strict=True):
        x.narrow(dim, span.start, len(span)).add_(piece)


class Group:
    """What ``head_ranks`` neighbouring ranks are after they exchanged heads for sequence: each a ring of its own with
    its share of the heads. ``number``: which share."""

    def __init__(self, case: Case, head_ranks: int, number: int) -> None:
        self.case, self.problem = case, inner_problem(case.problem, head_ranks)
        self.heads = slice(number * self.problem.heads, (number + 1) * self.problem.heads)
        self.times = kv_repeats(case.problem.heads, case.problem.kv_heads, head_ranks)
        self.kv_heads = slice(number * self.problem.kv_heads, (number + 1) * self.problem.kv_heads)

    def rows(self, x: Tensor, rank: int) -> Tensor:
        """A rank's part of q, grad, out or lse."""
        return cut(x[:, self.heads], self.problem.rows(rank))

    def columns(self, x: Tensor, rank: int) -> Tensor:
        """A rank's part of k or v."""
        return cut(x.repeat_interleave(self.times, 1)[:, self.kv_heads], self.problem.columns(rank))

    def attend(self, comm: ThreadComm) -> Attend:
        """The block attention of a rank; its kernel calls are among the events of ``comm``."""
        facts, p = self.case.facts, self.case.problem
        bias = facts.bias
        if bias is not None:
            bias = bias[:, self.heads] if bias.shape[1] > 1 else bias
            bias = cut(bias, self.problem.rows(comm.rank)) if p.bias == "rows" else bias
        heads = torch.arange(p.heads)[self.heads]
        facts = dataclasses.replace(
            facts,
            bias=bias,
            index=[torch.arange(p.batch), heads],
            shape=[p.batch, p.heads, p.queries, p.keys],
        )
        return Attend(self.problem, facts, comm.rank, comm.events.append)


def attend_and_differentiate(forward: str, backward: str, case: Case) -> Result:
    """Whole results of one algorithm forward and one backward, on as many ranks as the problem has."""
    out, lse, comms = attend_over_ranks(forward, case)
    gradients, others = differentiate_over_ranks(backward, case, out, lse)
    return Result(out, lse, gradients, comms, others)


def _groups(name: str, case: Case) -> list[Group]:
    algorithm = ALGORITHMS[name]
    refusal = algorithm.refusal(case.problem)
    if refusal:
        raise ValueError(refusal)
    head_ranks = algorithm.head_ranks(case.problem)
    return [Group(case, head_ranks, number) for number in range(head_ranks)]


def attend_over_ranks(name: str, case: Case) -> tuple[Tensor, Tensor, list[ThreadComm]]:
    """out and lse, sinks included, and the ranks."""
    p, ranks = case.problem, list[list[ThreadComm]]()
    out = torch.zeros(p.batch, p.heads, p.queries, p.value_width, dtype=wide(p.dtype))
    lse = out[..., 0].clone()
    for group in _groups(name, case):

        def one(comm: ThreadComm, group: Group = group) -> tuple[Tensor, Tensor]:
            pieces = group.rows(case.q, comm.rank), group.columns(case.k, comm.rank), group.columns(case.v, comm.rank)
            return ALGORITHMS[name].forward(*pieces, group.attend(comm), comm)

        results, comms = run(group.problem.size, one)
        ranks.append(comms)
        for rank, (out_part, lse_part) in enumerate(results):
            add(out[:, group.heads], out_part, group.problem.rows(rank))
            add(lse[:, group.heads], lse_part, group.problem.rows(rank))
    if case.facts.sinks is not None:
        merged = torch.logaddexp(lse, case.facts.sinks.to(lse.dtype)[:, None])
        out, lse = out * torch.exp(lse - merged).unsqueeze(-1), merged
    return out, lse, ranks[0]


def differentiate_over_ranks(
    name: str, case: Case, out: Tensor, lse: Tensor
) -> tuple[Gradients, list[ThreadComm]]:
    """Whole gradients, given whole final results, and the ranks."""
    ranks = list[list[ThreadComm]]()
    dtype = wide(case.problem.dtype)
    to_q, to_k, to_v = (torch.zeros_like(x, dtype=dtype) for x in (case.q, case.k, case.v))
    to_bias = torch.zeros_like(case.facts.bias, dtype=dtype) if case.problem.bias_gradient else None
    for group in _groups(name, case):

        def one(comm: ThreadComm, group: Group = group) -> Gradients:
            rows = [group.rows(x, comm.rank) for x in (case.grad, case.q)]
            columns = [group.columns(x, comm.rank) for x in (case.k, case.v)]
            saved = group.rows(out.to(case.problem.dtype), comm.rank), group.rows(lse, comm.rank)
            return ALGORITHMS[name].backward(*rows, *columns, *saved, group.attend(comm), comm)

        results, comms = run(group.problem.size, one)
        ranks.append(comms)
        _join(group, results, Gradients(to_q, to_k, to_v, to_bias))
    return Gradients(to_q, to_k, to_v, to_bias), ranks[0]


def _join(group: Group, parts: list[Gradients], into: Gradients) -> None:
    """Write what the ranks of a group found into the whole gradients; what several hold a part of is summed."""
    problem = group.problem
    kv_heads = torch.arange(into.k.shape[1]).repeat_interleave(group.times)[group.kv_heads]
    for rank, part in enumerate(parts):
        add(into.q[:, group.heads], part.q, problem.rows(rank))
        for whole, piece in ((into.k, part.k), (into.v, part.v)):
            repeated = torch.zeros_like(whole[:, kv_heads])
            add(repeated, piece, problem.columns(rank))
            whole.index_add_(1, kv_heads, repeated)
        if into.bias is None:
            continue
        assert part.bias is not None
        mine = into.bias[:, group.heads] if into.bias.shape[1] > 1 else into.bias
        if problem.bias == "rows":
            add(mine, part.bias, problem.rows(rank))
        else:
            mine.add_(part.bias)

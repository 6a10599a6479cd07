"""Tokens from attention nodes to expert nodes and back: M to N, over pairs of leaders (`runtime.mesh.roles.Pair`).

Per layer and microbatch an attention node sends to every expert node

    header   int64 [step, layer, microbatch, rows, ended]
    rows     of the tokens that have chosen an expert there, if there are any (`autopar.runtime.comm.rows`)

and is returned ``sums`` [rows, H], what the node's experts add up to for these tokens. An expert node joins the rows of
all attention nodes, so its experts run once. All nodes go through the steps, in these through the layers, in these
through the microbatches. What a row consists of is known per layer.

On a CPU one message has the header and its rows, up to `_FIRST` bytes; a receive that large is posted before, as gloo
takes a shorter message, too. What does not fit follows in a second message. On GPUs headers go over gloo, and rows over
NCCL. What is sent is kept until it has arrived.

The leader of a node talks for it, and shares what it is sent with the node's other ranks on tp.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.cost.ping_pong import Interval
from autopar.ir.traffic import Traffic
from autopar.runtime.comm.rows import Memory, RowFormat
from autopar.runtime.fault.aborts import started
from autopar.runtime.fault.errors import CollectiveError, board, explained
from autopar.runtime.fault.store_client import StoreError
from autopar.runtime.mesh.process_groups import PATIENCE, Groups
from autopar.runtime.mesh.roles import Roles

KIND = "experts"  # in the ledger
_HEADER = 5  # numbers
_HEADER_BYTES = 8 * _HEADER
_HEADERS, _ROWS, _SUMS = 1, 2, 3  # tags, for gloo
_HOST = torch.device("cpu")
_FIRST = 1 << 20  # bytes of a header and the rows that come with it
_MOST_SENT = 32  # messages to a node that are kept before this rank waits for the oldest to arrive


class _Ends:
    """What both ends of pairs have in common."""

    def __init__(self, roles: Roles, groups: Groups, rows: Sequence[RowFormat]) -> None:
        self._roles, self._groups, self._formats = roles, groups, rows
        self._pairs = roles.pairs
        self._tp = groups.mesh.size("tp")
        self._source = groups.ranks("tp")[0] if self._tp > 1 else 0
        self._local = [roles.local(pair.peer) for pair in self._pairs]
        on_host = groups.device.type == "cpu"
        self._begin = _HEADER_BYTES if on_host else 0  # of rows, in the memory of their header or in one of their own
        self._with_header = _FIRST - _HEADER_BYTES if on_host else 0  # bytes of rows, at most
        self._kept: list[deque[tuple[dist.Work, Tensor | Memory]]] = [deque() for _ in self._pairs]  # on their way
        self._free: list[Memory] = []  # of messages that have arrived
        self._gone = [0] * len(self._pairs)  # messages that have arrived
        self.timeline: list[Interval] = []  # what this rank has computed in the present step
        roles.ends.append(self)
        self.open = False  # messages may be on their way
        self._counts = {(KIND, kind): [0, 0] for kind in ("headers", "rows", "sums")}

    @property
    def traffic(self) -> dict[tuple[str, str], Traffic]:
        """What this rank has sent so far."""
        return {key: Traffic(*found) for key, found in self._counts.items() if found[0]}

    def fail(self, error: BaseException) -> None:
        """This rank's serving has failed: all ranks of both roles learn of it within a heartbeat, and none waits on."""
        self.open = False
        first = (str(error).splitlines() or [""])[0]
        own = f"{self._roles.named(self._roles.rank)} failed: {type(error).__name__}: {first}"[:500]
        with suppress(StoreError):  # the error itself explains more
            board().give_verdict(error.why if isinstance(error, CollectiveError) else own)

    def _send(self, i: int, what: str, group: dist.ProcessGroup, tag: int, x: Tensor, kept: Tensor | Memory) -> None:
        """Start to send ``x`` to node ``i`` of the other role; ``kept`` is kept until it has arrived."""
        with self._explained(what, i):
            if len(self._kept[i]) >= _MOST_SENT:
                self._arrived(i, self._gone[i] + 1)
            self._kept[i].append((_begun(group.send([x], self._pairs[i].place, tag)), kept))

    def _receive(self, i: int, what: str, group: dist.ProcessGroup, tag: int, x: Tensor) -> dist.Work:
        """Start to receive ``x`` from node ``i`` of the other role."""
        with self._explained(what, i):
            return _begun(group.recv([x], self._pairs[i].place, tag))

    def _count(self, kind: str, size: int) -> None:
        counted = self._counts[KIND, kind]
        counted[0] += 1
        counted[1] += size

    def _memory(self, size: int) -> Memory:
        """Memory on the host for a message of so many bytes."""
        if size > _FIRST:
            return Memory(size, _HOST)
        return self._free.pop() if self._free else Memory(_FIRST, _HOST)

    def _sent(self, i: int) -> int:
        """Messages sent to node ``i`` so far."""
        return self._gone[i] + len(self._kept[i])

    def _arrived(self, i: int, count: int) -> None:
        """Wait until the first ``count`` messages to node ``i`` have arrived, and let go of them."""
        while self._gone[i] < count:
            work, kept = self._kept[i].popleft()
            work.wait()
            self._gone[i] += 1
            if isinstance(kept, Memory) and len(kept) == _FIRST:
                self._free.append(kept)

    def _explained(self, what: str, i: int) -> explained:
        return explained(f"{what} ({self._roles.named(self._pairs[i].peer)})", [self._local[i]])

    def _shared(self, x: Tensor) -> Tensor:
        """The tensor of the node's leader, on all its ranks."""
        if self._tp > 1 and x.numel():
            with explained("sharing with the node's other ranks", self._groups.ranks("tp")):
                dist.broadcast(x.view(-1).view(torch.uint8), self._source, group=self._groups.group("tp"))
        return x


@dataclass(slots=True)
class Answer:
    """What node ``i`` returns, ``sums`` of ``tokens``, None: of all. ``sent``: messages sent to it until then."""

    i: int
    work: dist.Work
    sums: Tensor
    tokens: Tensor | None
    sent: int


@dataclass(slots=True)
class Asked:
    """Tokens ``x`` on their way to experts and back."""

    where: str
    x: Tensor
    answers: list[Answer] = field(default_factory=list)


class AskingPairs(_Ends):
    """The attention side: answers `ask_experts` of the bound graph by `start` and `finish`.

    ``rows``: of each layer. `resume` says of which microbatch the next calls are. All ranks of the node make the same
    calls.
    """

    def __init__(self, roles: Roles, groups: Groups, rows: Sequence[RowFormat]) -> None:
        assert roles.role == "attention", "expert nodes answer"
        super().__init__(roles, groups, rows)
        self.step = self.microbatch = 0
        self._since = 0.0  # when the resumed microbatch began to compute
        self._experts = [of_layer.num_experts // roles.expert_nodes for of_layer in rows]  # of a node
        self._nodes = torch.arange(roles.expert_nodes, device=groups.device).view(-1, 1, 1)

    def resume(self, step: int, microbatch: int) -> None:
        """The following calls are of this microbatch of a step."""
        self.open = True
        if step != self.step:
            self.timeline.clear()
        self.step, self.microbatch, self._since = step, microbatch, time.time()

    def start(self, layer: int, x: Tensor, expert: Tensor | None, weights: Tensor | None) -> Asked:
        """Send tokens ``x`` [T, H] to the nodes of their experts ``expert`` [T, K], with ``weights`` [T, K]."""
        self.timeline.append(Interval("attention", layer, self.microbatch, self._since, time.time()))
        asked = Asked(self._where(layer), x)
        if not self._pairs:
            return asked
        what, rows = f"asking experts of {asked.where}", self._formats[layer]
        parts = rows.parts_of(x, expert, weights)
        started(str, what)
        for i, (tokens, count) in enumerate(self._chosen(layer, expert, x.size(0))):
            self._ask(i, what, layer, count, parts, tokens)
            if count:
                sums = x.new_empty(count, rows.hidden)
                work = self._receive(i, what, self._pairs[i].sums, _SUMS, sums)
                asked.answers.append(Answer(i, work, sums, tokens, self._sent(i)))
        return asked

    def finish(self, pending: Asked) -> Tensor:
        """What the experts add up to for the tokens: [T, H], summed over nodes in their order."""
        what = f"waiting for the sums of {pending.where}"
        total: Tensor | None = None
        for answer in pending.answers:
            with self._explained(what, answer.i):
                answer.work.wait(self._groups.timeout)
                self._arrived(answer.i, answer.sent)
            if total is None and answer.tokens is None:
                total = answer.sums
                continue
            total = _zeros(pending.x) if total is None else total
            if answer.tokens is None:
                total += answer.sums
            else:
                total.index_add_(0, answer.tokens, answer.sums)
        total = self._shared(_zeros(pending.x) if total is None else total)
        self._since = time.time()
        return total

    def empty(self, layer: int) -> None:
        """A microbatch, or a step, without tokens here: the expert nodes wait for this node all the same."""
        for i in range(len(self._pairs)):
            self._ask(i, f"asking experts of {self._where(layer)}", layer)

    def end(self) -> None:
        """No step follows: the expert nodes end when all attention nodes have said so."""
        self.open = False
        for i in range(len(self._pairs)):
            self._ask(i, "ending", 0, ended=1)
        for i in range(len(self._pairs)):
            with self._explained("ending", i):
                self._arrived(i, self._sent(i))

    def _where(self, layer: int) -> str:
        return f"step {self.step}, layer {layer}, microbatch {self.microbatch}"

    def _chosen(self, layer: int, expert: Tensor | None, tokens: int) -> list[tuple[Tensor | None, int]]:
        """For each node the numbers of its tokens, None: all, and how many."""
        nodes = len(self._pairs)
        if expert is None or nodes == 1:
            return [(None, tokens)] * nodes
        hit = (expert.div(self._experts[layer], rounding_mode="floor") == self._nodes).any(2)  # [nodes, T]
        counts = hit.sum(1).tolist()
        if all(count in (0, tokens) for count in counts):
            return [(None, count) for count in counts]
        places = hit.nonzero()[:, 1].split(counts)
        return [(None if count == tokens else of_node, count) for of_node, count in zip(places, counts)]

    def _ask(
        self, i: int, what: str, layer: int, count: int = 0, parts: Sequence[Tensor] = (), tokens: Tensor | None = None,
        ended: int = 0,
    ) -> None:  # fmt: skip
        """Start to send to node ``i`` a header and ``count`` rows: of these tokens, None: of all."""
        pair, size, begin = self._pairs[i], self._formats[layer].row_bytes * count, self._begin
        header = self._memory(_HEADER_BYTES + (size if begin else 0))
        header.numbers[:_HEADER] = self.step, layer, self.microbatch, count, ended
        rows = header if begin else Memory(size, self._groups.device)
        if count:
            self._formats[layer].write(rows, begin, parts, tokens)
        first = min(size, self._with_header)
        self._count("headers", _HEADER_BYTES)
        self._send(i, what, pair.headers, _HEADERS, header.bytes[: _HEADER_BYTES + first], header)
        if count:
            self._count("rows", size)
        if first < size:
            self._send(i, what, pair.rows, _ROWS, rows.bytes[begin + first : begin + size], rows)


class AnsweringPairs(_Ends):
    """The experts' side. ``rows``: of each layer. ``microbatches``: how many the attention nodes have in each step.
    Collective over the node."""

    def __init__(self, roles: Roles, groups: Groups, rows: Sequence[RowFormat], microbatches: int = 1) -> None:
        assert roles.role == "experts", "attention nodes ask"
        super().__init__(roles, groups, rows)
        self._microbatches = microbatches
        self._step = -1
        # The node's other ranks wait for the leader as long as it waits for attention.
        self._control = groups.control(PATIENCE, ["tp"]) if self._tp > 1 else None
        self._first = [Memory(_FIRST, _HOST) for _ in self._pairs]  # of each node's next message
        self._coming: list[dist.Work] = []
        self._post()
        self.open = True

    def serve(self, answer: Callable[[int, Tensor, Tensor | None, Tensor | None], Tensor]) -> None:
        """Answer until all attention nodes have ended. ``answer(layer, x, expert, weights)`` [T, H] is what this node's
        experts add up to for tokens x [T, H]; it isn't called where no token has chosen one of them. All ranks of the
        node call it.

        Raises ValueError for a header of another step, layer or microbatch than the one that follows, which names both
        ends; CollectiveError that names ranks that are gone.
        """
        try:
            while self._run_step(answer):
                pass
            for i in range(len(self._pairs)):
                self._arrived(i, self._sent(i))
            self.open = False
        except BaseException as error:
            self.fail(error)
            raise

    def _run_step(self, answer: Callable[..., Tensor]) -> bool:
        """False: there is none, the attention nodes have ended."""
        for layer in range(len(self._formats)):
            for microbatch in range(self._microbatches):
                counts = self._rows_of_nodes(layer, microbatch)
                if counts is None:
                    return False
                self._answer(answer, layer, microbatch, counts)
        return True

    def _answer(self, answer: Callable[..., Tensor], layer: int, microbatch: int, counts: list[int]) -> None:
        if layer == microbatch == 0:
            self.timeline.clear()
        where = f"step {self._step}, layer {layer}, microbatch {microbatch}"
        total, of_layer = sum(counts), self._formats[layer]
        rows = self._rows(of_layer, counts, where) if total else None
        self._post()
        if rows is None:
            return
        self._shared(rows.bytes)
        x, expert, weights = of_layer.read(rows, 0, total)
        start = time.time()
        sums = answer(layer, x, expert, weights).detach().contiguous()
        self.timeline.append(Interval("experts", layer, microbatch, start, time.time()))
        assert sums.shape == (total, of_layer.hidden) and sums.dtype == of_layer.dtype, "a sum per token"
        for i, part in enumerate(sums.split(counts) if self._pairs else ()):
            if len(part):
                self._count("sums", part.nbytes)
                self._send(i, f"returning the sums of {where}", self._pairs[i].sums, _SUMS, part, part)

    def _rows(self, of_layer: RowFormat, counts: Sequence[int], where: str) -> Memory:
        """The rows of all attention nodes, one after the other."""
        if not self._pairs:
            return Memory(of_layer.row_bytes * sum(counts), self._groups.device)
        pieces, works, what = [], [], f"waiting for the rows of {where}"
        for i, (pair, count) in enumerate(zip(self._pairs, counts)):
            size, memory, begin = of_layer.row_bytes * count, self._first[i], self._begin
            first = min(size, self._with_header)
            if first < size:
                memory = Memory(begin + size, self._groups.device)
                memory.bytes[: begin + first] = self._first[i].bytes[: begin + first]
                rest = memory.bytes[begin + first : begin + size]
                works.append((i, self._receive(i, what, pair.rows, _ROWS, rest)))
            pieces.append((memory, begin, count))
        for i, work in works:
            with self._explained(what, i):
                work.wait(self._groups.timeout)
        return of_layer.join(pieces, self._groups.device)

    def _rows_of_nodes(self, layer: int, microbatch: int) -> list[int] | None:
        """How many rows each attention node sends; None: they have ended."""
        found = [0] * (2 + self._roles.attention_nodes)
        if self._pairs:
            headers = [self._header(i) for i in range(len(self._pairs))]
            first = (layer, microbatch) == (0, 0)
            step = max(self._step + 1, headers[0][0]) if first else self._step
            ended = first and all(header[4] for header in headers)
            for i, header in enumerate(headers):
                if not ended and header != [step, layer, microbatch, header[3], 0]:
                    raise self._misfit(i, header, f"step {step}, layer {layer}, microbatch {microbatch}")
            found = [int(ended), step, *(header[3] for header in headers)]
        if self._control is not None:
            shared = torch.tensor(found)
            with explained("waiting for the leader of the node", self._groups.ranks("tp")):
                dist.broadcast(shared, self._source, group=self._control)
            found = shared.tolist()
        over, self._step, *counts = found
        return None if over else counts

    def _post(self) -> None:
        """Receive the next headers, and the rows that come with them."""
        size = _HEADER_BYTES + self._with_header
        self._coming = []
        for i, (pair, memory) in enumerate(zip(self._pairs, self._first)):
            self._coming.append(self._receive(i, "waiting for attention", pair.headers, _HEADERS, memory.bytes[:size]))

    def _header(self, i: int) -> list[int]:
        with self._explained("waiting for the next step of attention", i):
            self._coming[i].wait()
        found: list[int] = self._first[i].numbers[:_HEADER].tolist()
        return found

    def _misfit(self, i: int, header: Sequence[int], expected: str) -> ValueError:
        step, layer, microbatch, _, ended = header
        found = "the end" if ended else f"step {step}, layer {layer}, microbatch {microbatch}"
        here, there = (self._roles.named(rank) for rank in (self._roles.rank, self._pairs[i].peer))
        return ValueError(
            f"serve: {here} expects {expected} next, found {found} from {there}; run the same steps with the same "
            "number of microbatches on all attention ranks"
        )


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a member of the group gets a handle"
    return work


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format)

"""Tokens from attention nodes to expert nodes and back: M to N, over pairs of leaders (`runtime.mesh.roles.Pair`).

Per layer and microbatch an attention node sends to every expert node

    header   int64 [step, layer, microbatch, rows, ended]
    rows     if there are any, one message of bytes: a row per token that has chosen an expert there, of its x [H], the
             experts' numbers as int32 [K] and their weights [K]

and is returned ``sums`` [rows, H], what the node's experts add up to for these tokens. An expert node joins the rows of
all attention nodes, so its experts run once. Receives are posted before they are needed; what is sent is kept until it
has arrived. All nodes go through the steps, in these through the layers, in these through the microbatches.

The leader of a node talks for it, and shares what it is sent with the node's other ranks on tp.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.cost.ping_pong import Interval
from autopar.ir.traffic import Traffic
from autopar.runtime.fault.aborts import started
from autopar.runtime.fault.errors import CollectiveError, board, explained
from autopar.runtime.fault.store_client import StoreError
from autopar.runtime.mesh.process_groups import PATIENCE, Groups
from autopar.runtime.mesh.roles import Pair, Roles

KIND = "experts"  # in the ledger
_HEADER = 5  # numbers
_HEADERS, _ROWS, _SUMS = 1, 2, 3  # tags, for gloo
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_SENT = 32  # messages to a node that are kept before this rank waits for the oldest to arrive


@dataclass(frozen=True)
class RowFormat:
    """What a row of a token consists of. ``weights_dtype`` None: x alone, and every token goes to every node (the
    experts are slices of a dense MLP)."""

    num_experts: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    weights_dtype: torch.dtype | None

    @cached_property
    def _parts(self) -> list[torch.dtype]:
        """The dtypes of x, the experts' numbers and their weights."""
        return [self.dtype] if self.weights_dtype is None else [self.dtype, torch.int32, self.weights_dtype]

    @cached_property
    def _sizes(self) -> list[int]:
        """The bytes of each."""
        return [n * dtype.itemsize for n, dtype in zip((self.hidden, self.top_k, self.top_k), self._parts)]

    @cached_property
    def unit(self) -> torch.dtype:
        """The widest integers that each consists of: bytes are copied more slowly."""
        return _INTEGERS[math.gcd(8, *self._sizes)]

    @property
    def row_bytes(self) -> int:
        """Bytes of the row of a token."""
        return sum(self._sizes)

    def empty(self, tokens: int, device: torch.device) -> Tensor:
        """Rows to be received."""
        return torch.empty(tokens, self.row_bytes // self.unit.itemsize, dtype=self.unit, device=device)

    def packed(self, x: Tensor, expert: Tensor | None, weights: Tensor | None) -> Tensor:
        """A row for each token: [T, n] of `unit`."""
        given = [x] if expert is None or weights is None else [x, expert, weights]
        rows = [part.to(dtype).contiguous().view(self.unit) for part, dtype in zip(given, self._parts)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 1)

    def unpacked(self, rows: Tensor) -> list[Tensor | None]:
        """x [T, H], expert [T, K], weights [T, K] of rows."""
        pieces = rows.split([size // self.unit.itemsize for size in self._sizes], 1)
        found: list[Tensor | None] = [piece.contiguous().view(dtype) for piece, dtype in zip(pieces, self._parts)]
        if found[1:] and found[1] is not None:
            found[1] = found[1].to(torch.int64)
        return [*found, None, None][:3]


class _Ends:
    """What both ends of pairs have in common."""

    def __init__(self, roles: Roles, groups: Groups, rows: RowFormat) -> None:
        self._roles, self._groups, self._format = roles, groups, rows
        self._pairs = roles.pairs
        self._tp = groups.mesh.size("tp")
        self._source = groups.ranks("tp")[0] if self._tp > 1 else 0
        self._kept: list[deque[tuple[dist.Work, Tensor]]] = [deque() for _ in self._pairs]  # on their way
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

    def _send(self, i: int, kind: str, tag: int, group: dist.ProcessGroup, x: Tensor) -> None:
        """Start to send to node ``i`` of the other role."""
        kept, counted = self._kept[i], self._counts[KIND, kind]
        if len(kept) >= _MOST_SENT:
            self._arrived(i, self._gone[i] + 1)
        kept.append((_begun(group.send([x], self._pairs[i].place, tag)), x))
        counted[0] += 1
        counted[1] += x.nbytes

    def _sent(self, i: int) -> int:
        """Messages sent to node ``i`` so far."""
        return self._gone[i] + len(self._kept[i])

    def _arrived(self, i: int, count: int) -> None:
        """Wait until the first ``count`` messages to node ``i`` have arrived, and let go of them."""
        while self._gone[i] < count:
            self._kept[i].popleft()[0].wait()
            self._gone[i] += 1

    def _explained(self, what: str, i: int) -> AbstractContextManager[None]:
        peer = self._pairs[i].peer
        return explained(lambda: f"{what} ({self._roles.named(peer)})", [self._roles.local(peer)])

    def _shared(self, x: Tensor) -> Tensor:
        """The tensor of the node's leader, on all its ranks."""
        if self._tp > 1 and x.numel():
            with explained("sharing with the node's other ranks", self._groups.ranks("tp")):
                dist.broadcast(_bytes(x), self._source, group=self._groups.group("tp"))
        return x


@dataclass(slots=True)
class Asked:
    """Tokens on their way to experts and back. ``tokens``: numbers of those sent, node by node; None: all to each node.
    ``sums``: (node, work, what it returns of them, messages sent to it until then)."""

    where: str
    x: Tensor
    tokens: Tensor | None = None
    sums: list[tuple[int, dist.Work, Tensor, int]] = field(default_factory=list)


class AskingPairs(_Ends):
    """The attention side: answers `ask_experts` of the bound graph by `start` and `finish`.

    `resume` says of which microbatch the next calls are. All ranks of the node make the same calls.
    """

    def __init__(self, roles: Roles, groups: Groups, rows: RowFormat) -> None:
        assert roles.role == "attention", "expert nodes answer"
        super().__init__(roles, groups, rows)
        self.step = self.microbatch = 0
        self._since = 0.0  # when the resumed microbatch began to compute
        self._experts = rows.num_experts // roles.expert_nodes  # of a node
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
        asked.tokens, counts = self._chosen(expert, len(x))
        self._send_headers(layer, counts)  # first: the nodes get ready for the rows meanwhile
        rows = self._format.packed(x, expert, weights)
        of_node: Sequence[Tensor] = [rows] * len(counts)
        if asked.tokens is not None:
            of_node = rows.index_select(0, asked.tokens).split(counts)
        started(str, f"asking experts of {asked.where}")
        for i, (pair, part) in enumerate(zip(self._pairs, of_node)):
            if len(part):
                with self._explained(f"asking experts of {asked.where}", i):
                    self._send(i, "rows", _ROWS, pair.rows, _bytes(part))
                    sums = x.new_empty(len(part), self._format.hidden)
                    work = _begun(pair.sums.recv([_bytes(sums)], pair.place, _SUMS))
                asked.sums.append((i, work, sums, self._sent(i)))
        return asked

    def finish(self, pending: Asked) -> Tensor:
        """What the experts add up to for the tokens: [T, H], summed over nodes in their order."""
        total = torch.zeros_like(pending.x, memory_format=torch.contiguous_format)
        begin = 0
        for i, work, sums, sent in pending.sums:
            with self._explained(f"waiting for the sums of {pending.where}", i):
                work.wait(self._groups.timeout)
                self._arrived(i, sent)
            if pending.tokens is None:
                total += sums
            else:
                total.index_add_(0, pending.tokens[begin : begin + len(sums)], sums)
                begin += len(sums)
        total = self._shared(total)
        self._since = time.time()
        return total

    def empty(self, layer: int) -> None:
        """A microbatch, or a step, without tokens here: the expert nodes wait for this node all the same."""
        self._send_headers(layer, [0] * len(self._pairs))

    def end(self) -> None:
        """No step follows: the expert nodes end when all attention nodes have said so."""
        self.open = False
        self._send_headers(0, [0] * len(self._pairs), ended=1)
        for i in range(len(self._pairs)):
            with self._explained("ending", i):
                self._arrived(i, self._sent(i))

    def _where(self, layer: int) -> str:
        return f"step {self.step}, layer {layer}, microbatch {self.microbatch}"

    def _chosen(self, expert: Tensor | None, tokens: int) -> tuple[Tensor | None, list[int]]:
        """(numbers of the tokens of each node, node by node; None: all for each; how many)."""
        nodes = len(self._pairs)
        if expert is None or nodes == 1:
            return None, [tokens] * nodes
        hit = (expert.div(self._experts, rounding_mode="floor") == self._nodes).any(2)  # [nodes, T]
        where = hit.nonzero()
        return where[:, 1], torch.bincount(where[:, 0], minlength=nodes).tolist()

    def _send_headers(self, layer: int, counts: Sequence[int], ended: int = 0) -> None:
        for i, (pair, count) in enumerate(zip(self._pairs, counts)):
            with self._explained(f"asking experts of {self._where(layer)}", i):
                header = torch.tensor([self.step, layer, self.microbatch, count, ended])
                self._send(i, "headers", _HEADERS, pair.headers, header)


class AnsweringPairs(_Ends):
    """The experts' side. ``microbatches``: how many the attention nodes have in each step. Collective over the node."""

    def __init__(self, roles: Roles, groups: Groups, rows: RowFormat, microbatches: int = 1) -> None:
        assert roles.role == "experts", "attention nodes ask"
        super().__init__(roles, groups, rows)
        self._microbatches = microbatches
        self._step = -1
        # The node's other ranks wait for the leader as long as it waits for attention.
        self._control = groups.control(PATIENCE, ["tp"]) if self._tp > 1 else None
        self._headers = [self._post(pair) for pair in self._pairs]
        self.open = True

    def serve(self, answer: Callable[[int, Tensor, Tensor | None, Tensor | None], Tensor], layers: int) -> None:
        """Answer until all attention nodes have ended. ``answer(layer, x, expert, weights)`` [T, H] is what this node's
        experts add up to for tokens x [T, H]; it isn't called where no token has chosen one of them. All ranks of the
        node call it.

        Raises ValueError for a header of another step, layer or microbatch than the one that follows, which names both
        ends; CollectiveError that names ranks that are gone.
        """
        try:
            while self._run_step(answer, layers):
                pass
            for i in range(len(self._pairs)):
                self._arrived(i, self._sent(i))
            self.open = False
        except BaseException as error:
            self.fail(error)
            raise

    def _run_step(self, answer: Callable[..., Tensor], layers: int) -> bool:
        """False: there is none, the attention nodes have ended."""
        for layer in range(layers):
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
        rows = self._format.empty(sum(counts), self._groups.device)
        works = []
        for i, (pair, part) in enumerate(zip(self._pairs, rows.split(counts))):
            if len(part):
                works.append((i, _begun(pair.rows.recv([_bytes(part)], pair.place, _ROWS))))
        for i, work in works:
            with self._explained(f"waiting for the rows of {where}", i):
                work.wait(self._groups.timeout)
        self._headers = [self._post(pair) for pair in self._pairs]  # the next ones
        if not len(rows):
            return
        x, expert, weights = self._format.unpacked(self._shared(rows))
        start = time.time()
        sums = answer(layer, x, expert, weights).detach().contiguous()
        self.timeline.append(Interval("experts", layer, microbatch, start, time.time()))
        assert sums.shape == (len(rows), self._format.hidden) and sums.dtype == self._format.dtype, "a sum per token"
        for i, part in enumerate(sums.split(counts) if self._pairs else ()):
            if len(part):
                with self._explained(f"returning the sums of {where}", i):
                    self._send(i, "sums", _SUMS, self._pairs[i].sums, _bytes(part))

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

    def _post(self, pair: Pair) -> tuple[dist.Work, Tensor]:
        header = torch.empty(_HEADER, dtype=torch.int64)
        with explained("waiting for attention", [self._roles.local(pair.peer)]):
            return _begun(pair.headers.recv([header], pair.place, _HEADERS)), header

    def _header(self, i: int) -> list[int]:
        work, header = self._headers[i]
        with self._explained("waiting for the next step of attention", i):
            work.wait()
        found: list[int] = header.tolist()
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


def _bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    return x.view(-1).view(torch.uint8)

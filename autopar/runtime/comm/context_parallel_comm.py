"""Context-parallel attention on a running mesh: the Comm of its algorithms, on top of process groups.

An algorithm starts exchanges, computes, and waits for them, so communication overlaps within the attention node.
Its traffic is known only after it has run, so an AxisComm counts its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from autopar.adapters.operators import OpOverload, argument_defaults, name_of
from autopar.attention import operator as context
from autopar.attention.exchanges import Expected, Sent
from autopar.attention.operator import HOW
from autopar.ir.graph import copy_graph
from autopar.ir.traffic import Ledger, Traffic, add_ledgers, traffic_of
from autopar.ops.mask_spec import FACTS
from autopar.runtime.comm import collectives
from autopar.runtime.comm.collectives import finish
from autopar.runtime.comm.step_notes import open_notes
from autopar.runtime.comm.wait_times import waiting
from autopar.runtime.fault.aborts import started
from autopar.runtime.fault.errors import explained
from autopar.runtime.mesh.process_groups import Groups


class AxisComm:
    """`autopar.attention.exchanges.Comm` along an axis of a mesh, for one node. All ranks of the axis make theirs at
    the same point. Raises CollectiveError that names axis, node, what was exchanged and the ranks which failed.

    traffic: what this rank has sent so far; what an exchange sends is one call. open: how many exchanges nobody has
    waited for.
    """

    def __init__(self, groups: Groups, axis: str, node: str) -> None:
        self.rank, self.size = groups.index(axis), groups.size(axis)
        self.traffic: Ledger = {}
        self.open = 0
        self._groups, self._axis, self._node = groups, axis, node
        self._ranks = groups.ranks(axis)
        if self.size > 1:
            with explained(self._words("connecting"), self._ranks):
                groups.connect(axis)

    def exchange(self, way: str, what: str, send: Sent | None, receive: Expected | None) -> PeerExchange:
        """One launch: on one stream (NCCL), two ranks that both send first would wait for each other."""
        target, sent = send or (-1, ())
        source, likes = receive or (-1, ())
        assert self.rank not in (target, source), f"{what}: a rank exchanges with others"
        assert all(x.is_contiguous() for x in sent), f"{what}: only contiguous tensors can be sent"
        came = [torch.empty(like.shape, dtype=like.dtype, device=self._groups.device) for like in likes]
        peers = {word: self._ranks[peer] for word, peer in (("to", target), ("from", source)) if peer >= 0}
        text = " ".join([f'"{what}" {way}', *(f"{word} rank {rank}" for word, rank in peers.items())])
        works: list[dist.Work] = []
        if (notes := open_notes()) is not None:
            notes.note(f"what is sent: {self._words(text)}", sent)
        if sent or came:
            started(self._words, text)
            with explained(self._words(text), list(peers.values())):
                group = self._groups.channel(way, self._axis)
                calls = [dist.P2POp(dist.isend, x, group=group, group_peer=target) for x in sent]
                calls += [dist.P2POp(dist.irecv, x, group=group, group_peer=source) for x in came]
                works += dist.batch_isend_irecv(calls)
        if sent:
            self._count(f"send {way}", sum(x.nbytes for x in sent))

        def arrived() -> list[Tensor]:
            with explained(self._words(text), list(peers.values())), waiting(self._axis):
                for work in works:
                    work.wait()
            if (notes := open_notes()) is not None:
                notes.note(f"what came: {self._words(text)}", came, received=True)
            return came

        return PeerExchange(self, arrived, sent)

    def all_gather(self, what: str, x: Tensor) -> PeerExchange:
        return self._collective(collectives.all_gather, what, x, x.unsqueeze(0), lambda made: made)

    def reduce_scatter(self, what: str, x: Tensor) -> PeerExchange:
        return self._collective(collectives.reduce_scatter, what, x, x, lambda made: made.squeeze(0))

    def _collective(
        self,
        start: Callable[..., collectives.Start],
        what: str,
        x: Tensor,
        sent: Tensor,
        done: Callable[[Tensor], Tensor],
    ) -> PeerExchange:
        pending = start(self._groups, f"{self._node}, {what}", 0, [], self._axis)(sent)
        self._count(start.__name__, traffic_of(start.__name__, tuple(x.shape), x.dtype, self.size))
        return PeerExchange(self, lambda: [done(finish(pending))], (x,))

    def _count(self, kind: str, sent: int) -> None:
        self.traffic = add_ledgers(self.traffic, {(self._axis, kind): Traffic(1, sent)})

    def _words(self, what: str) -> str:
        return f'{what} over axis "{self._axis}" (node {self._node})'


@dataclass
class PeerExchange:
    """`autopar.attention.exchanges.Pending`. ``kept``: tensors that must live until then. Is waited for once."""

    comm: AxisComm
    arrived: Callable[[], list[Tensor]] | None
    kept: Sequence[Tensor]

    def __post_init__(self) -> None:
        self.comm.open += 1

    def wait(self) -> list[Tensor]:
        arrived, self.arrived = self.arrived, None
        assert arrived is not None, "an exchange is waited for once"
        self.comm.open -= 1
        found = arrived()
        self.kept = ()
        return found


# --- nodes of a graph ------------------------------------------------------------------------------------

_FORWARD = torch.ops.autopar.context_attention.default
_BACKWARD = torch.ops.autopar.context_attention_backward.default
OPERATORS = (_FORWARD, _BACKWARD)


class Comms:
    """The Comms of one bound graph, and what has been counted of its other exchanges whose sizes runs decide."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._made: list[AxisComm] = []
        self._counted: Ledger = {}
        self._functions: list[Callable[..., Any]] = []  # that compiled code finds by number

    @property
    def traffic(self) -> Ledger:
        """What this rank has sent over them so far."""
        return add_ledgers(self._counted, *(one.traffic for one in self._made))

    def count(self, axis: str, kind: str, sent: int) -> None:
        """One exchange, and the bytes that left this rank."""
        self._counted = add_ledgers(self._counted, {(axis, kind): Traffic(1, sent)})

    def function_of(self, operator: OpOverload, args: Sequence[Any], node: str) -> Callable[..., Any]:
        """What a node of one of the `OPERATORS` runs: takes the arguments of the operator in order."""
        given = dict(zip(argument_defaults(operator), args, strict=True))
        run, which = (
            (context.forward_over_ranks, "forward")
            if operator is _FORWARD
            else (context.backward_over_ranks, "backward")
        )
        algorithm = given[which]
        own = AxisComm(self._groups, given["axis"], f"{node}, {algorithm}")
        self._made.append(own)

        def context_attention(*args: Any) -> Any:
            out = run(own, *args)
            assert not own.open, f"{algorithm}: did not wait for {own.open} of its exchanges"
            return out

        return context_attention

    def compilable(self, gm: GraphModule) -> GraphModule:
        """A copy of a graph with these nodes opaque to a compiler: they find what they run by a number."""
        copied = copy_graph(gm)
        for node in copied.graph.nodes:
            if node.target in OPERATORS:
                number, function = next(_numbers), self.function_of(node.target, node.args, node.name)
                self._functions.append(function)
                _numbered[number] = function
                node.target, node.args = _OPAQUE[node.target], (number, *node.args)
        copied.recompile()
        return copied


_numbers = itertools.count()
_numbered: WeakValueDictionary[int, Callable[..., Any]] = WeakValueDictionary()  # lives as long as its Comms
_library = torch.library.Library("autopar_runtime", "FRAGMENT")


def _opaque(operator: OpOverload, arguments: str, results: str) -> OpOverload:
    """``operator`` with a number ahead of its arguments, and a kernel that runs what has this number."""
    name = name_of(operator).removeprefix("autopar::")
    _library.define(f"{name}(int number, {arguments}) -> ({results})")
    _library.impl(name, lambda number, *args: _numbered[number](*args), "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar_runtime::{name}", lambda number, *args: operator(*args), lib=_library)
    made: OpOverload = getattr(torch.ops.autopar_runtime, name).default
    return made


_OPAQUE = {
    _FORWARD: _opaque(_FORWARD, f"Tensor q, Tensor k, Tensor v, {FACTS}, {HOW}", "Tensor out, Tensor lse"),
    _BACKWARD: _opaque(
        _BACKWARD,
        f"Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {FACTS}, {HOW}, bool bias_needs_grad",
        "Tensor q_grad, Tensor k_grad, Tensor v_grad, Tensor bias_grad, Tensor sinks_grad",
    ),
}

"""TokenRing: keys and values stay, queries circulate, and each result goes straight to the owner of its queries;
Wang et al., arXiv:2412.20501.

    step 0    start to send q to the neighbour           the own rows attend to the own columns
    step t    start to send on the received q,           its rows attend to the own columns
              and to return the results of step t - 1

Backward: q, the gradient of the output, the final log-sum-exp and delta = rowsum(gradient * output) circulate. dk and
dv are accumulated locally; each share of dq goes straight to its owner. Queries and results use both directions of the
links. The queries take the direction that sends less. Of packed documents, queries that few ranks need go straight to
them, as in `autopar.passes.attention.ring`.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from autopar.attention.algorithm import AttentionAlgorithm
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.attend import Attend, Gradients, Partials, stand_in
from autopar.attention.exchanges import Comm
from autopar.attention.problem import Problem, Spans
from autopar.ops.kernels import wide
from autopar.passes.attention.circulate import (
    Journey,
    Packet,
    RingRank,
    apart,
    heads_first,
    runs,
    shorter,
    tokens_first,
    zero_bias,
)


class TokenRing(AttentionAlgorithm):
    """Queries circulate, results return."""

    name = "token_ring"
    title = "queries circulate, results return straight to their owners"
    layouts = ("zigzag", "contiguous")

    def refusal(self, problem: Problem) -> str:
        """See `AttentionAlgorithm.refusal`."""
        if problem.bias != "rows":
            return ""
        return (
            f'context_parallel: attention "{self.name}": needs a bias that is the same for all queries, since each '
            'rank holds the bias of its own queries only; choose "ring", "zigzag_ring" or "all_gather"'
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend, comm: Comm) -> tuple[Tensor, Tensor]:
        """See `AttentionAlgorithm.forward`."""
        problem, width = attend.problem, v.shape[-1]
        rows, columns = problem.rows(comm.rank), problem.columns(comm.rank)
        ring = RingRank(shorter(problem, "rows"), problem, comm, attend.documents)
        held = Packet.of(rows, ring.own.travelling(1), tokens_first(q))
        into = Partials.empty(q, width)

        def result(packet: Packet) -> Packet:
            """Results of a packet's rows over this rank's columns: out in the model's dtype, lse in its wide one."""
            rows_q = heads_first(packet.tensors[0])
            found = Partials.empty(rows_q, width)
            if packet.spans:
                attend.forward(rows_q, k, v, packet.spans, columns, found)
            out, lse = tokens_first(found.out.to(q.dtype)), tokens_first(found.lse.unsqueeze(-1))
            return Packet(packet.spans, (out.contiguous(), lse.contiguous()))

        straight = held.take(())
        around = found = result(straight)
        for hop in range(comm.size + 1):
            coming = ring.onward("q", held, hop + 1, Journey.travelling)
            mine = ring.outward("q", rows, hop + 1, tokens_first(q))
            results = [
                ring.homeward("out, lse", around, hop - 1, Journey.used),
                ring.homeward("out, lse", found, hop - 1, Journey.straight),
            ]
            if hop == 0:
                attend.forward(q, k, v, rows, columns, into)
            else:
                around, found = result(held.take(ring.at(hop).used(hop))), result(straight)
            for theirs in results:
                _merge(into, rows, theirs.wait())
            held, straight = coming.wait(), mine.wait()
        return into.out, into.lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, attend: Attend, comm: Comm
    ) -> Gradients:
        """See `AttentionAlgorithm.backward`."""
        problem, width = attend.problem, q.shape[-1]
        rows, columns = problem.rows(comm.rank), problem.columns(comm.rank)
        ring = RingRank(shorter(problem, "rows"), problem, comm, attend.documents)
        dtype = wide(q.dtype)
        delta = (grad.to(dtype) * out.to(dtype)).sum(-1)
        sums = tokens_first(lse.to(dtype).unsqueeze(-1), delta.unsqueeze(-1))
        queries = tokens_first(q, grad), sums
        held = Packet.of(rows, ring.own.travelling(1), *queries)
        own = Packet(rows, (tokens_first(q),)).zeros(dtype)
        into = Gradients(
            heads_first(own.tensors[0]),
            k.new_zeros(k.shape, dtype=dtype),
            v.new_zeros(v.shape, dtype=dtype),
            zero_bias(attend),
        )

        def gradients(packet: Packet) -> Packet:
            """Gradients of a packet's rows; those of this rank's columns are accumulated here."""
            rows_q, rows_grad = apart(packet.tensors[0], width)
            rows_lse, rows_delta = heads_first(packet.tensors[1]).unbind(-1)
            found = Packet(packet.spans, (packet.tensors[0][..., :width],)).zeros(dtype)
            if packet.spans:
                here = dataclasses.replace(into, q=heads_first(found.tensors[0]))
                rows_out = stand_in(rows_grad, rows_delta)
                attend.backward(rows_grad, rows_q, k, v, rows_out, rows_lse, packet.spans, columns, here)
            return found

        straight = held.take(())
        around = found = gradients(straight)
        for hop in range(comm.size + 1):
            coming = ring.onward("q, dout", held, hop + 1, Journey.travelling)
            mine = ring.outward("q, dout", rows, hop + 1, *queries)
            returned = [
                ring.homeward("dq", around, hop - 1, Journey.used),
                ring.homeward("dq", found, hop - 1, Journey.straight),
            ]
            if hop == 0:
                attend.backward(grad, q, k, v, out, lse, rows, columns, into)
            else:
                around, found = gradients(held.take(ring.at(hop).used(hop))), gradients(straight)
            for theirs in returned:
                own.add(theirs.wait())
            held, straight = coming.wait(), mine.wait()
        return into


def _merge(into: Partials, rows: Spans, packet: Packet) -> None:
    """Merge results for some of this rank's rows."""
    done, out, lse = 0, heads_first(packet.tensors[0]), heads_first(packet.tensors[1]).squeeze(-1)
    for first, length in runs(rows, packet.spans):
        into.merge(out.narrow(2, done, length), lse.narrow(2, done, length), first)
        done += length


ALGORITHMS.add(TokenRing.name, TokenRing())

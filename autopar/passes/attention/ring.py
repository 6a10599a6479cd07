"""Ring attention: queries stay, keys and values circulate; Liu et al., arXiv:2310.01889.

    step 0    start to send k, v to the neighbour           attend to the rank's own columns
    step t    start to send on what was received            attend to the columns of rank - t, merge by log-sum-exp

Backward: k and v circulate a second time, dq is accumulated locally. dk and dv of a span start where it is first used
and follow it one step behind: each rank adds its share while the next block is computed. The last user sends them
straight to the owner. A rank's own gradients of its own columns never travel, so a full ring makes one hop less than
one whose gradients start at the owner.

Packed documents may leave a span few users. Then it goes straight from its owner to each of them (`Trip.straight`), and
each returns its share of dk and dv.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from autopar.attention.algorithm import AttentionAlgorithm
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.attend import Attend, Gradients, Partials
from autopar.attention.exchanges import Comm
from autopar.attention.problem import Problem
from autopar.ops.kernels import wide
from autopar.passes.attention.circulate import (
    Circulation,
    Journey,
    Packet,
    RingRank,
    apart,
    shorter,
    tokens_first,
    zero_bias,
)


class Ring(AttentionAlgorithm):
    """Keys and values circulate up."""

    name = "ring"
    title = "keys and values circulate through the ranks"
    layouts: tuple[str, ...] = ("contiguous",)

    def circulations(self, problem: Problem) -> tuple[Circulation, ...]:
        """Circulations of columns; together they carry each column once."""
        return (Circulation("columns", 1),)

    def _start(self, k: Tensor, v: Tensor, attend: Attend, comm: Comm) -> tuple[list[RingRank], list[Packet]]:
        """The circulations, and the packet that this rank sends into each."""
        problem, documents = attend.problem, attend.documents
        home, fused = problem.columns(comm.rank), tokens_first(k, v)
        rings = [RingRank(c, problem, comm, documents) for c in self.circulations(problem)]
        return rings, [Packet.of(home, ring.own.travelling(1), fused) for ring in rings]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend, comm: Comm) -> tuple[Tensor, Tensor]:
        """See `AttentionAlgorithm.forward`."""
        problem, width = attend.problem, k.shape[-1]
        rows, columns = problem.rows(comm.rank), problem.columns(comm.rank)
        into, fused = Partials.empty(q, v.shape[-1]), tokens_first(k, v)
        rings, held = self._start(k, v, attend, comm)
        for hop in range(comm.size):
            coming = [w.onward("k, v", p, hop + 1, Journey.travelling) for w, p in zip(rings, held)]
            coming += [w.outward("k, v", columns, hop + 1, fused) for w in rings]
            if hop == 0:
                attend.forward(q, k, v, rows, columns, into)
            else:
                for packet in held:
                    their_k, their_v = apart(packet.tensors[0], width)
                    attend.forward(q, their_k, their_v, rows, packet.spans, into)
            held = [c.wait() for c in coming]
        return into.out, into.lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, attend: Attend, comm: Comm
    ) -> Gradients:
        """See `AttentionAlgorithm.backward`."""
        problem, width = attend.problem, k.shape[-1]
        rows, columns, fused = problem.rows(comm.rank), problem.columns(comm.rank), tokens_first(k, v)
        rings, held = self._start(k, v, attend, comm)
        own = Packet(columns, (fused,)).zeros(wide(k.dtype))
        to_k, to_v = apart(own.tensors[0], width)
        into = Gradients(q.new_zeros(q.shape, dtype=wide(q.dtype)), to_k, to_v, zero_bias(attend))

        def gradients(packet: Packet) -> Packet:
            """Gradients of a packet's columns; those of this rank's rows are accumulated locally."""
            found = packet.zeros(wide(k.dtype))
            their_k, their_v = apart(packet.tensors[0], width)
            to_k, to_v = apart(found.tensors[0], width)
            here = dataclasses.replace(into, k=to_k, v=to_v)
            attend.backward(grad, q, their_k, their_v, out, lse, rows, packet.spans, here)
            return found

        sums = [own.take(()) for _ in (*rings, *rings)]  # of what came around, of what came straight
        for hop in range(comm.size + 1):
            coming = [w.onward("k, v", p, hop + 1, Journey.travelling) for w, p in zip(rings, held)]
            coming += [w.outward("k, v", columns, hop + 1, fused) for w in rings]
            behind = [w.onward("dk, dv", s, hop, Journey.summed) for w, s in zip(rings, sums)]
            ended = [w.homeward("dk, dv", s, hop - 1, Journey.ended) for w, s in zip(rings, sums)]
            ended += [w.homeward("dk, dv", s, hop - 1, Journey.straight) for w, s in zip(rings, sums[len(rings) :])]
            if hop == 0:
                attend.backward(grad, q, k, v, out, lse, rows, columns, into)
            else:
                sums = [gradients(packet) for packet in held]
            for mine, theirs in zip(sums, behind):
                mine.add(theirs.wait())
            for theirs in ended:
                own.add(theirs.wait())
            held = [c.wait() for c in coming]
        return into


class BiRing(Ring):
    """A ring in both directions: the first half of each span of keys goes up while the second half goes down.

        k0 v0    rank 0 --> rank 1 --> rank 2 -->          k1 v1    rank 0 <-- rank 1 <-- rank 2 <--

    Each direction of a link carries half as much, so full-duplex links take half the time.
    """

    name = "bi_ring"
    title = "half of the keys and values circulates in each direction"
    layouts = ("zigzag", "contiguous")

    def circulations(self, problem: Problem) -> tuple[Circulation, ...]:
        return Circulation("columns", 1, 0, 2), Circulation("columns", -1, 1, 2)


class ZigzagRing(Ring):
    """For causal sequences with zigzag load balancing: rank i has chunks i and 2N - 1 - i, so all steps cost the same.

        step 0    both own chunks against both                    (two triangles and a square)
        step t    keys of a lower rank: all queries, first half of the keys
                  keys of a higher rank: second half of the queries, all keys

    It circulates *down*. Only lower ranks use the second half of a rank's keys; they come first, and it travels no
    further: three quarters of a full ring's bytes, for any number of ranks.
    """

    name = "zigzag_ring"
    title = "keys and values circulate, the late ones only as far as they are used"
    layouts = ("zigzag",)

    def circulations(self, problem: Problem) -> tuple[Circulation, ...]:
        return (Circulation("columns", -1),)


class Ulysses(Ring):
    """All ranks exchange heads for sequence; Jacobs et al., arXiv:2309.14509.

    The all-to-alls stand in the graph around the attention (`AttentionAlgorithm.head_ranks`). Between them one rank
    remains: it has the whole sequence of its heads, and nothing circulates.
    """

    name = "ulysses"
    title = "heads are exchanged for sequence, and back"
    layouts = ("contiguous", "zigzag")

    def refusal(self, problem: Problem) -> str:
        """See `AttentionAlgorithm.refusal`."""
        if problem.heads % problem.size == 0:
            return ""
        return (
            f'context_parallel: attention "{self.name}": {problem.heads} query heads do not divide over {problem.size} '
            f'ranks; it needs a multiple of {problem.size} heads: choose fewer ranks, "hybrid" or "ring"'
        )

    def head_ranks(self, problem: Problem) -> int:
        """See `AttentionAlgorithm.head_ranks`."""
        return problem.size

    def circulations(self, problem: Problem) -> tuple[Circulation, ...]:
        return ()


class Hybrid(Ring):
    """Groups of neighbouring ranks exchange heads for sequence, and a ring connects the groups; Fang and Zhao,
    arXiv:2405.07719.

        8 ranks, 4 heads:   (0 1 2 3) (4 5 6 7)    inside ( ) heads for sequence; a ring of two from group to group

    The ring takes the direction that sends less: down for a causal sequence with zigzag load balancing.
    """

    name = "hybrid"
    title = "heads for sequence within groups, a ring over the groups"
    layouts = ("zigzag", "contiguous")

    def refusal(self, problem: Problem) -> str:
        """See `AttentionAlgorithm.refusal`."""
        if _group_sizes(problem):
            return ""
        return (
            f'context_parallel: attention "{self.name}": needs a group size between 1 and {problem.size} that divides '
            f'{problem.size} ranks and {problem.heads} query heads, found none; choose "ring"'
        )

    def head_ranks(self, problem: Problem) -> int:
        """The largest group that needs no repeated key heads, else the largest."""
        return max(_group_sizes(problem), key=lambda size: (problem.kv_heads % size == 0, size))

    def circulations(self, problem: Problem) -> tuple[Circulation, ...]:
        return (shorter(problem, "columns"),)


def _group_sizes(problem: Problem) -> list[int]:
    """Proper divisors of the number of ranks that divide the query heads."""
    return [n for n in range(2, problem.size) if problem.size % n == 0 and problem.heads % n == 0]


for _algorithm in (Ring(), BiRing(), ZigzagRing(), Ulysses(), Hybrid()):
    ALGORITHMS.add(_algorithm.name, _algorithm)

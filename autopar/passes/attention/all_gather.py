"""All-gather attention: keys and values are gathered, a few heads at a time; as in Llama 3, arXiv:2407.21783.

    gather heads 0
    gather heads 1          meanwhile attend with heads 0: the queries that use them, to all columns
    gather heads 2          meanwhile attend with heads 1
    ...

Each step gathers about as much as one rank holds of all heads. Backward: keys and values are gathered a second time; dk
and dv of all columns are reduce-scattered while the next heads are computed. Every mask and every token layout sends
the same number of bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.attention.algorithm import AttentionAlgorithm
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.attend import Attend, Gradients, Partials
from autopar.attention.exchanges import Comm, Pending
from autopar.attention.problem import Problem, Span, Spans
from autopar.ops.kernels import wide
from autopar.passes.attention.circulate import apart, pick, tokens_first, zero_bias


class AllGather(AttentionAlgorithm):
    """Each rank attends to all keys."""

    name = "all_gather"
    title = "keys and values are gathered, some heads at a time"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend, comm: Comm) -> tuple[Tensor, Tensor]:
        """See `AttentionAlgorithm.forward`."""
        rows, columns = attend.problem.rows(comm.rank), _in_order(_dealt(attend.problem))
        into = Partials.empty(q, v.shape[-1])
        for share, tokens in _gathered(k, v, attend, comm):
            mine, (all_k, all_v) = share.of_q, apart(tokens, k.shape[-1])
            here = Partials(into.out[:, mine], into.lse[:, mine], [Span(0, q.shape[2])])
            share.attend.forward(q[:, mine], all_k, all_v, rows, columns, here)
        return into.out, into.lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, attend: Attend, comm: Comm
    ) -> Gradients:
        """See `AttentionAlgorithm.backward`."""
        rows, dealt, width = attend.problem.rows(comm.rank), _dealt(attend.problem), k.shape[-1]
        columns = _in_order(dealt)
        to_q, to_k, to_v = (x.new_zeros(x.shape, dtype=wide(x.dtype)) for x in (q, k, v))
        to_bias = zero_bias(attend)

        def receive(heads: slice, coming: Pending) -> None:
            for whole, part in zip((to_k, to_v), apart(coming.wait()[0], width)):
                whole[:, heads] = part

        scattered: list[tuple[slice, Pending]] = []
        for share, tokens in _gathered(k, v, attend, comm):
            mine, (all_k, all_v) = share.of_q, apart(tokens, width)
            sums = tokens.new_zeros(tokens.shape, dtype=wide(tokens.dtype))
            here = Gradients(to_q[:, mine], *apart(sums, width), _heads(to_bias, mine))
            of_rows = grad[:, mine], q[:, mine]
            share.attend.backward(*of_rows, all_k, all_v, out[:, mine], lse[:, mine], rows, columns, here)
            while scattered:
                receive(*scattered.pop())
            by_rank = pick(sums, columns, dealt).unflatten(0, (comm.size, -1))
            scattered.append((share.heads, comm.reduce_scatter("dk, dv", by_rank)))
        receive(*scattered.pop())
        return Gradients(to_q, to_k, to_v, to_bias)


@dataclass(frozen=True)
class _Share:
    """Some key heads, the query heads that use them, and block attention over these."""

    heads: slice
    of_q: slice
    attend: Attend


def _shares(attend: Attend, device: torch.device) -> Iterator[_Share]:
    problem, facts = attend.problem, attend.facts
    group, step = problem.heads // problem.kv_heads, max(1, problem.kv_heads // problem.size)
    batch, heads = facts.index[:2] or (torch.arange(n, device=device) for n in (problem.batch, problem.heads))
    for first in range(0, problem.kv_heads, step):
        last = min(first + step, problem.kv_heads)
        of_q = slice(first * group, last * group)
        of_heads = Attend(
            dataclasses.replace(problem, heads=(last - first) * group, kv_heads=last - first),
            dataclasses.replace(
                facts,
                bias=_heads(facts.bias, of_q),
                lift=_heads(facts.lift, of_q),
                index=[batch, heads[of_q]],
                shape=facts.shape or [problem.batch, problem.heads, problem.queries, problem.keys],
            ),
            attend.rank,
            attend.observe,
        )
        yield _Share(slice(first, last), of_q, of_heads)


def _heads(bias: Tensor | None, heads: slice) -> Tensor | None:
    """The slice of a bias (or of its gradient) for some heads; the bias itself if all heads share it."""
    return bias if bias is None or bias.shape[1] == 1 else bias[:, heads]


def _gathered(k: Tensor, v: Tensor, attend: Attend, comm: Comm) -> Iterator[tuple[_Share, Tensor]]:
    """Per share of the heads, k and v of all columns in order: [keys, B, H, D + Dv]. While the caller uses one share,
    the next is being gathered."""

    def start(share: _Share) -> Pending:
        return comm.all_gather("k, v", tokens_first(k[:, share.heads], v[:, share.heads]).contiguous())

    shares, dealt = list(_shares(attend, k.device)), _dealt(attend.problem)
    coming = start(shares[0])
    for share, following in zip(shares, [*shares[1:], None]):
        (found,) = coming.wait()
        if following is not None:
            coming = start(following)
        yield share, pick(found.flatten(0, 1), dealt, _in_order(dealt))


def _dealt(problem: Problem) -> Spans:
    """All columns, in the order in which the ranks hold them after the gather."""
    return tuple(span for rank in range(problem.size) for span in problem.columns(rank))


def _in_order(spans: Spans) -> Spans:
    return tuple(sorted(spans, key=lambda span: span.start))


ALGORITHMS.add(AllGather.name, AllGather())

"""Context-parallel attention in one process: global tensors in, global results out.

    case = Case.of(problem)
    found = attend_and_differentiate("ring", "token_ring", case)        forward and backward, each on a thread per rank
    right = on_the_whole(case)

A rank gets its shards of rows and columns. Exchanging heads for sequence (Ulysses) is another way to shard.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.attend import Attend, Gradients
from autopar.attention.problem import Problem, Spans, inner_problem, kv_repeats
from autopar.ops.kernels import wide
from autopar.ops.mask_spec import MaskSpec
from autopar.passes import attention as attention  # fills ALGORITHMS
from autopar.testing.thread_comm import ThreadComm, run


@dataclass
class Case:
    """A problem with its global tensors and the gradient of its output."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    facts: MaskSpec

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
        facts = MaskSpec(
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
class AttentionFound:
    """Global results, in the dtype of accumulation, and the ranks of forward and backward (those of the first group of
    heads, if heads are exchanged for sequence)."""

    out: Tensor
    lse: Tensor
    gradients: Gradients
    forward: list[ThreadComm] = field(default_factory=list)
    backward: list[ThreadComm] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        """out, lse and all gradients."""
        found = self.gradients
        return [self.out, self.lse, found.q, found.k, found.v] + ([] if found.bias is None else [found.bias])


def on_the_whole(case: Case) -> AttentionFound:
    """The same by the operator on global tensors."""
    facts = [getattr(case.facts, f.name) for f in dataclasses.fields(MaskSpec) if f.name not in ("mask", "lift")]
    out, lse = torch.ops.autopar.attention(case.q, case.k, case.v, *facts)
    q, k, v, bias, _ = torch.ops.autopar.attention_backward(
        case.grad, case.q, case.k, case.v, out, lse, *facts, case.problem.bias_gradient
    )
    return AttentionFound(out, lse, Gradients(q, k, v, bias if case.problem.bias_gradient else None))


def cut(x: Tensor, spans: Spans, dim: int = 2) -> Tensor:
    """A rank's shard of a global tensor."""
    return torch.cat([x.narrow(dim, s.start, len(s)) for s in spans], dim)


def add_piece(x: Tensor, part: Tensor, spans: Spans, dim: int = 2) -> None:
    """Add a rank's shard to a global tensor."""
    for span, piece in zip(spans, part.split([len(s) for s in spans], dim), strict=True):
        x.narrow(dim, span.start, len(span)).add_(piece)


class Group:
    """Ranks after ``head_ranks`` neighbours have exchanged heads for sequence: separate rings, each with a share of the
    heads. ``number``: index of the share."""

    def __init__(self, case: Case, head_ranks: int, number: int) -> None:
        self.case, self.problem = case, inner_problem(case.problem, head_ranks)
        self.heads = slice(number * self.problem.heads, (number + 1) * self.problem.heads)
        self.times = kv_repeats(case.problem.heads, case.problem.kv_heads, head_ranks)
        self.kv_heads = slice(number * self.problem.kv_heads, (number + 1) * self.problem.kv_heads)

    def rows(self, x: Tensor, rank: int) -> Tensor:
        """A rank's shard of q, grad, out or lse."""
        return cut(x[:, self.heads], self.problem.rows(rank))

    def columns(self, x: Tensor, rank: int) -> Tensor:
        """A rank's shard of k or v."""
        return cut(x.repeat_interleave(self.times, 1)[:, self.kv_heads], self.problem.columns(rank))

    def attend(self, comm: ThreadComm) -> Attend:
        """The block attention of a rank, whose kernel calls are recorded in the events of ``comm``."""
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


def attend_and_differentiate(forward: str, backward: str, case: Case) -> AttentionFound:
    """Global results with one algorithm for forward and one for backward, on all ranks of the problem."""
    out, lse, comms = attend_over_ranks(forward, case)
    gradients, others = differentiate_over_ranks(backward, case, out, lse)
    return AttentionFound(out, lse, gradients, comms, others)


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
            k, v = (group.columns(x, comm.rank) for x in (case.k, case.v))
            return ALGORITHMS[name].forward(group.rows(case.q, comm.rank), k, v, group.attend(comm), comm)

        results, comms = run(group.problem.size, one)
        ranks.append(comms)
        for rank, (out_part, lse_part) in enumerate(results):
            add_piece(out[:, group.heads], out_part, group.problem.rows(rank))
            add_piece(lse[:, group.heads], lse_part, group.problem.rows(rank))
    if case.facts.sinks is not None:
        merged = torch.logaddexp(lse, case.facts.sinks.to(lse.dtype)[:, None])
        out, lse = out * torch.exp(lse - merged).unsqueeze(-1), merged
    return out, lse, ranks[0]


def differentiate_over_ranks(name: str, case: Case, out: Tensor, lse: Tensor) -> tuple[Gradients, list[ThreadComm]]:
    """Global gradients for global final results, and the ranks."""
    ranks = list[list[ThreadComm]]()
    dtype = wide(case.problem.dtype)
    to_q, to_k, to_v = (torch.zeros_like(x, dtype=dtype) for x in (case.q, case.k, case.v))
    bias = case.facts.bias if case.problem.bias_gradient else None
    to_bias = None if bias is None else torch.zeros_like(bias, dtype=dtype)
    for group in _groups(name, case):

        def one(comm: ThreadComm, group: Group = group) -> Gradients:
            grad, q = (group.rows(x, comm.rank) for x in (case.grad, case.q))
            k, v = (group.columns(x, comm.rank) for x in (case.k, case.v))
            saved = group.rows(out.to(case.problem.dtype), comm.rank), group.rows(lse, comm.rank)
            return ALGORITHMS[name].backward(grad, q, k, v, *saved, group.attend(comm), comm)

        results, comms = run(group.problem.size, one)
        ranks.append(comms)
        _join(group, results, Gradients(to_q, to_k, to_v, to_bias))
    return Gradients(to_q, to_k, to_v, to_bias), ranks[0]


def _join(group: Group, parts: list[Gradients], into: Gradients) -> None:
    """Write gradients of the ranks of a group into the global gradients; partial ones are summed."""
    problem = group.problem
    kv_heads = torch.arange(into.k.shape[1]).repeat_interleave(group.times)[group.kv_heads]
    for rank, part in enumerate(parts):
        add_piece(into.q[:, group.heads], part.q, problem.rows(rank))
        for whole, piece in ((into.k, part.k), (into.v, part.v)):
            repeated = torch.zeros_like(whole[:, kv_heads])
            add_piece(repeated, piece, problem.columns(rank))
            whole.index_add_(1, kv_heads, repeated)
        if into.bias is None:
            continue
        assert part.bias is not None
        mine = into.bias[:, group.heads] if into.bias.shape[1] > 1 else into.bias
        if problem.bias == "rows":
            add_piece(mine, part.bias, problem.rows(rank))
        else:
            mine.add_(part.bias)

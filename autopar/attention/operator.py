"""Attention over a sequence that is sharded over ranks, as operators of a local graph.

    out, lse = attention_of_piece(q, k, v, ..., "ring", "ring", [1, -1], [1, -1], "cp", 4, 1)

q, k, v are one rank's shards; the mask covers the global sequence (key_mask and segments are unsharded, a bias has this
rank's rows and all columns). Local graphs call `attention_of_piece`. It is composed of the operators below, which have
shapes but no kernel: running them takes a `Comm`, and a step graph gets one when it is lowered.

Algorithms that exchange heads (Ulysses: Jacobs et al., 2023) have these exchanges around them as conversions of the
graph, over neighbouring ranks ("cp%4": of four); the rest runs over the others ("cp/4"). So the backward saves the
results of the exchanges and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.adapters.operators import argument_defaults
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.attend import Attend
from autopar.attention.exchanges import Comm
from autopar.attention.layouts import Blocks
from autopar.attention.problem import Mask, Problem, kv_repeats
from autopar.ir.conversions import exchange
from autopar.ir.placement import REPLICATE, Placement, Shard
from autopar.ops.attention import fake_gradients, register_backward, rows_first, sinks_grad
from autopar.ops.kernels import note_blocked_rows, wide, with_sinks
from autopar.ops.kernels.kernel import HUGE, NEVER
from autopar.ops.mask_spec import FACTS, MaskSpec

HOW = "str forward, str backward, int[] query_blocks, int[] key_blocks, str axis, int size"
_HOW = 6  # how many arguments these are
FACT_NAMES = tuple(argument_defaults(torch.ops.autopar.attention.default))[3:]

_library = torch.library.Library("autopar", "FRAGMENT")
_library.define(f"context_attention(Tensor q, Tensor k, Tensor v, {FACTS}, {HOW}) -> (Tensor out, Tensor lse)")
_library.define(
    f"context_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {FACTS}, {HOW}, "
    "bool bias_needs_grad) -> (Tensor q_grad, Tensor k_grad, Tensor v_grad, Tensor bias_grad, Tensor sinks_grad)"
)


def problem_of_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    facts: MaskSpec,
    query_blocks: Sequence[int],
    key_blocks: Sequence[int],
    size: int,
    bias_gradient: bool = False,
) -> Problem:
    """The input of an algorithm: sizes, layout and mask of the global attention, from one rank's shards."""
    bias = "" if facts.bias is None else "rows" if facts.bias.dim() > 1 and facts.bias.shape[-2] > 1 else "columns"
    return Problem(
        batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1], queries=q.shape[2] * size, keys=k.shape[2] * size,
        width=q.shape[3], value_width=v.shape[3], dtype=q.dtype, size=size,
        mask=Mask(facts.causal, facts.window, facts.chunk),
        query_blocks=tuple(query_blocks), key_blocks=tuple(key_blocks), bias=bias, bias_gradient=bias_gradient,
        segments=facts.segments is not None, key_mask=facts.key_mask is not None, sinks=facts.sinks is not None,
        softcap=facts.softcap, dropout=facts.dropout, documents=tuple(facts.documents),
    )  # fmt: skip


# --- running ---------------------------------------------------------------------------------------------


def forward_over_ranks(comm: Comm, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """`autopar::context_attention` over a Comm: out [B, Hq, s, Dv] and lse [B, Hq, s] of this rank's queries."""
    facts, (name, _, query_blocks, key_blocks, _, size) = _split(rest)
    problem, facts = problem_of_pieces(q, k, v, facts, query_blocks, key_blocks, size), _lifted(facts)
    if facts.lift is None:
        note_blocked_rows(facts.bias)
    out, lse = ALGORITHMS[name].forward(q, k, v, Attend(problem, facts, comm.rank), comm)
    out, lse = with_sinks(out, lse, facts.sinks)
    return rows_first(out.to(q.dtype)), lse.contiguous()


def backward_over_ranks(
    comm: Comm, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`autopar::context_attention_backward` over a Comm: gradients of q, k, v, bias and sinks (the last two empty if
    there is nothing to differentiate)."""
    *rest_, bias_needs_grad = rest
    facts, (_, name, query_blocks, key_blocks, _, size) = _split(rest_)
    problem = problem_of_pieces(q, k, v, facts, query_blocks, key_blocks, size, bias_needs_grad)
    facts = _lifted(facts)
    found = ALGORITHMS[name].backward(grad, q, k, v, out, lse, Attend(problem, facts, comm.rank), comm)
    to_bias = q.new_empty(0)
    if bias_needs_grad:
        assert facts.bias is not None and found.bias is not None
        to_bias = found.bias.to(facts.bias.dtype).reshape(facts.bias.shape)
    grads = (rows_first(g.to(x.dtype)) for g, x in ((found.q, q), (found.k, k), (found.v, v)))
    return *grads, to_bias, sinks_grad(grad, out, lse, facts)  # type: ignore[return-value]


def _lifted(facts: MaskSpec) -> MaskSpec:
    """Set ``lift`` where a bias blocks every key of a row by a large finite number: the number is subtracted from the
    row's scores, after it has rounded them as it does in one process. Otherwise the log-sum-exp would be that number,
    and the keys' scores would be lost.

    A rank has all columns of its rows, so it can find these rows. On accelerators it does not look: that would
    synchronize.
    """
    bias = facts.bias
    if bias is None or bias.device.type != "cpu" or not bias.numel() or facts.sinks is not None:
        return facts
    most = bias.detach().amax(-1, keepdim=True)
    blocked = (most <= HUGE) & (most > NEVER)
    return dataclasses.replace(facts, lift=most.masked_fill(~blocked, 0.0)) if bool(blocked.any()) else facts


def _split(rest: Sequence[Any]) -> tuple[MaskSpec, tuple[str, str, list[int], list[int], str, int]]:
    forward, backward, query_blocks, key_blocks, axis, size = rest[-_HOW:]
    return MaskSpec(*rest[:-_HOW]), (forward, backward, query_blocks, key_blocks, axis, size)


# --- shapes and autograd ---------------------------------------------------------------------------------


@torch.library.register_fake("autopar::context_attention", lib=_library)
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = q.shape
    out = q.new_empty(batch, rows, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, rows, dtype=wide(q.dtype))


@torch.library.register_fake("autopar::context_attention_backward", lib=_library)
def _backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *rest_, bias_needs_grad = rest
    return fake_gradients(grad, q, k, v, _split(rest_)[0], bias_needs_grad)


register_backward("context_attention", _HOW, _library)


# --- in local graphs -------------------------------------------------------------------------------------


def attention_of_piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    key_mask: Tensor | None,
    segments: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    window: int,
    chunk: int,
    offset: int,
    scale: float,
    softcap: float,
    dropout: float,
    site: int,
    index: Sequence[Tensor],
    shape: Sequence[int],
    documents: Sequence[int],
    forward: str,
    backward: str,
    query_blocks: Sequence[int],
    key_blocks: Sequence[int],
    axis: str,
    size: int,
    head_ranks: int,
) -> tuple[Tensor, Tensor]:
    """`autopar::attention` of a rank that holds shards of the sequence: q [B, Hq, s, D], k [B, Hk, t, D],
    v [B, Hk, t, Dv] -> out [B, Hq, s, Dv], lse [B, Hq, s].

    forward, backward: names of algorithms. query_blocks, key_blocks: how the sequence is dealt over the ``size`` ranks
    of ``axis``. head_ranks: `autopar.attention.algorithm.AttentionAlgorithm.head_ranks`.
    """
    facts = (causal, window, chunk, offset, scale, softcap, dropout, site)
    bias = _four_dims(bias, k.shape[2] * size) if bias is not None else None
    run = torch.ops.autopar.context_attention
    how: tuple[Any, ...] = (forward, backward, list(query_blocks), list(key_blocks))
    lists = list(shape), list(documents)
    if head_ranks == 1:
        tensors = (q, k, v, bias, key_mask, segments, sinks, seed)
        out, lse = run(*tensors, *facts, list(index), *lists, *how, axis, size)
        return out, lse
    heads = _Heads(f"{axis}%{head_ranks}", head_ranks, tuple(query_blocks), tuple(key_blocks))
    bias = heads.of_bias(bias, q.shape[1]) if bias is not None else None
    sinks = heads.convert(sinks, REPLICATE, Shard(0)) if sinks is not None else None
    mine = heads.of_index(index, q) if seed is not None else []
    times = kv_repeats(q.shape[1], k.shape[1], head_ranks)
    if times > 1:
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    q, k, v = heads.of(q, heads.rows), heads.of(k, heads.columns), heads.of(v, heads.columns)
    tensors = (q, k, v, bias, key_mask, segments, sinks, seed)
    if head_ranks < size:
        out, lse = run(*tensors, *facts, mine, *lists, *how, f"{axis}/{head_ranks}", size // head_ranks)
    else:  # this rank has the whole sequence
        mine[2:] = [torch.arange(x.shape[2], device=x.device) for x in (q, k)] if mine else []
        out, lse = torch.ops.autopar.attention(*tensors, *facts, mine, *lists)
    return heads.convert(out, Shard(1), heads.rows), heads.convert(lse, Shard(1), heads.rows)


def _four_dims(bias: Tensor, keys: int) -> Tensor:
    """[..., rows|1, columns|1] -> [B|1, H|1, rows|1, columns]."""
    bias = bias[(None,) * (4 - bias.dim())]
    return bias if bias.shape[-1] == keys else bias.expand(*bias.shape[:-1], keys)


class _Heads:
    """The exchange of sequence for heads, among neighbouring ranks."""

    def __init__(self, axis: str, ranks: int, query_blocks: Blocks, key_blocks: Blocks) -> None:
        self.axis, self.ranks = axis, ranks
        self.rows, self.columns = Shard(2, query_blocks), Shard(2, key_blocks)

    def convert(self, x: Tensor, src: Placement, dst: Placement) -> Tensor:
        return exchange(x, self.axis, self.ranks, str(src), str(dst))

    def of(self, x: Tensor, cut: Shard) -> Tensor:
        return self.convert(x, cut, Shard(1))

    def of_bias(self, bias: Tensor, heads: int) -> Tensor:
        """The bias of this rank's heads, for the rows of all."""
        by_rows, by_heads = bias.shape[2] > 1, bias.shape[1] == heads and heads > 1
        if by_rows:
            return self.convert(bias, self.rows, Shard(1) if by_heads else REPLICATE)
        return self.convert(bias, REPLICATE, Shard(1)) if by_heads else bias

    def of_index(self, index: Sequence[Tensor], q: Tensor) -> list[Tensor]:
        """Indices of batch, heads, rows and columns, for this rank's heads. (Those of rows and columns follow from
        positions.)"""
        found = list(index) or [torch.arange(n, device=q.device) for n in (*q.shape[:2], 1, 1)]
        found[1] = self.convert(found[1], REPLICATE, Shard(0))
        return found

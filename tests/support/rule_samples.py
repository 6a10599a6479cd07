"""A small sample call for every entry of the rule table: what `tests/rules/test_rules.py` puts through
`autopar/testing/soundness.py`.

Pointwise operators get theirs from their schema; the others are spelled out. Sizes are multiples of 6 where they can
be, so that they divide over 2 and over 3 ranks; 1 and broadcasting are among them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.attention.operator import attention_of_piece
from autopar.ir.conversions import convert, exchange, exchange_slice
from autopar.ir.halo import shift_of_piece, token_conv1d_of_piece
from autopar.ir.scans import scan_of_piece
from autopar.ops.few_bits.scaled_experts import scaled_experts
from autopar.ops.few_bits.scaled_products import scaled_linear
from autopar.ops.padded_pieces import zero_padding
from autopar.ops.token_dispatch import combine_tokens, dispatch_tokens
from autopar.ops.token_dispatch.dealt_rows import dealt_rows_of_rank
from autopar.ops.vocab_parallel import cross_entropy_of_piece, embedding_of_piece
from autopar.rules import RULES
from autopar.rules.table import overloads
from autopar.testing.soundness import Sample, call
from tests.support.expert_samples import EXPERTS, dispatch, experts
from tests.support.matrix_samples import diagonals, matrices, products
from tests.support.pick_samples import picks
from tests.support.pointwise_samples import complex_, integer, normal, pointwise, real, truth
from tests.support.space_samples import spatial

aten, ours = torch.ops.aten, torch.ops.autopar


# --- spelled out ------------------------------------------------------------------------------------------------------


def _views() -> Iterator[Sample]:
    for op in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        for before, after in (
            ((6, 12), (6, 2, 6)),
            ((2, 6, 12), (12, 12)),
            ((4, 6), (8, 3)),
            ((6, 1, 12), (1, 72)),
            ((12, 6), (6, 12)),
            ((24,), (2, 3, 4)),
            ((4, 3, 4), (48,)),
        ):
            yield call(op, normal(*before), list(after))
    yield call(aten.reshape.default, normal(2, 0, 6), [2, 0, 3, 2])
    yield call(aten.reshape.default, normal(4, 6, 0), [0, 4])
    yield call(aten.flatten.using_ints, normal(2, 6, 4), 1)
    yield call(aten.unflatten.int, normal(2, 24), 1, [6, 4])
    yield call(aten.unflatten.int, normal(12, 2), -2, [6, 2])
    yield call(aten.unsqueeze.default, normal(6, 12), 1)
    for shape in ((6, 1, 4), (2, 1, 6), (1, 3, 1)):
        yield call(aten.squeeze.default, normal(*shape))
        yield call(aten.squeeze.dim, normal(*shape), 1)
        yield call(aten.squeeze.dims, normal(*shape), [0, 1])
    yield call(aten.permute.default, normal(2, 6, 4), [2, 0, -2])
    yield call(aten.transpose.int, normal(2, 6, 4), -1, 0)
    yield call(aten.t.default, normal(6, 12))
    yield call(aten.t.default, normal(6))
    yield call(aten.expand.default, normal(1, 6), [4, 6, 6])
    yield call(aten.expand.default, normal(6, 1), [-1, 4])
    for sizes in ([6, 6], [6, 4, 2], [12]):
        yield call(aten.split_with_sizes.default, normal(6, 12), sizes, 1)
    yield call(aten.split.Tensor, normal(12, 6), 6)
    yield call(aten.split.Tensor, normal(6, 10), 4, -1)
    yield call(aten.chunk.default, normal(12, 6), 2)
    yield call(aten.chunk.default, normal(6, 10), 3, 1)
    yield call(aten.cat.default, [normal(6, 4), normal(6, 6)], -1)
    yield call(aten.cat.default, [normal(6, 2), normal(6, 2)])
    yield call(aten.cat.default, [normal(0), normal(6, 2)])
    yield call(aten.cat.default, [normal(6, 4), normal(6, 0)], -1)
    yield call(aten.stack.default, [normal(6, 4), normal(6, 4)], 1)
    yield call(aten.stack.default, [normal(6, 4)], -1)
    yield call(aten.select.int, normal(6, 12), 1, 3)
    yield call(aten.unbind.int, normal(2, 6), 0)
    for args in ((1, 0, 6), (1, 2, 12, 2), (0, 0, 6), (1,), (-1, -4)):
        yield call(aten.slice.Tensor, normal(6, 12), *args)
    yield call(aten.narrow.default, normal(6, 12), 1, 2, 6)
    for pad in ([1, 1], [1, -1], [0, 0, 2, 2], [0, 0]):
        yield call(aten.constant_pad_nd.default, normal(6, 6), pad)
        yield call(aten.pad.default, normal(6, 6), pad)
        yield call(aten.constant_pad_nd.default, normal(6, 6), pad, 1.5)
    yield call(aten.pad.default, normal(2, 6, 6), [1, 2], "reflect")
    yield call(aten.flip.default, normal(6, 12), [1])
    yield call(aten.roll.default, normal(6, 12), [1], [-1])
    yield call(aten.roll.default, normal(6, 12), [1])
    yield call(aten.slice_scatter.default, normal(6, 12), normal(6, 6), 1, 0, 6)
    yield call(aten.select_scatter.default, normal(6, 12), normal(6), 1, 2)
    yield call(aten.repeat_interleave.self_int, normal(6, 4), 2, 0)
    yield call(aten.repeat_interleave.self_int, normal(2, 6, 4), 6, 1)
    yield call(aten.repeat_interleave.self_int, normal(4, 6), 2)
    yield call(aten.repeat.default, normal(6, 4), [2, 1, 6])
    yield call(aten.view_as_real.default, complex_(6, 2))
    yield call(aten.view_as_real.default, complex_(2, 2))
    yield call(aten.view_as_complex.default, normal(6, 2))
    yield call(aten.view_as_complex.default, normal(2, 2))


def _reductions() -> Iterator[Sample]:
    for op in (
        aten.sum.default,
        aten.mean.default,
        aten.prod.default,
        aten.max.default,
        aten.min.default,
        aten.median.default,
        aten.var.default,
        aten.std.default,
        aten.argmax.default,
        aten.argmin.default,
        aten.count_nonzero.default,
    ):
        yield call(op, normal(6, 12))
    for op in (
        aten.sum.dim_IntList,
        aten.mean.dim,
        aten.amax.default,
        aten.amin.default,
        aten.var.dim,
        aten.std.dim,
        aten.var.correction,
        aten.std.correction,
        aten.logsumexp.default,
        aten.count_nonzero.dim_IntList,
    ):
        yield call(op, normal(6, 12), [1])
        yield call(op, normal(2, 6, 4), [-1, 1])
    for op in (aten.nansum.default, aten.std_mean.correction, aten.var_mean.correction):
        yield call(op, normal(6, 12))
        yield call(op, normal(2, 6, 4), [-1, 1])
        yield call(op, normal(6, 12), [0], keepdim=True)
    yield call(aten.aminmax.default, normal(6, 12))
    yield call(aten.aminmax.default, normal(6, 12), dim=-1, keepdim=True)
    for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.logsumexp.default):
        yield call(op, normal(6, 12), [0], True)
    yield call(aten.sum.dim_IntList, normal(6, 12), None)
    yield call(aten.amax.default, normal(6, 12))
    yield call(aten.sum.default, integer(6, 12))
    yield call(aten.sum.default, truth(6, 12))
    for op in (
        aten.max.dim,
        aten.min.dim,
        aten.prod.dim_int,
        aten.argmax.default,
        aten.argmin.default,
        aten.median.dim,
    ):
        yield call(op, normal(6, 12), 1)
        yield call(op, normal(6, 12), 0, True)
    yield call(aten.norm.ScalarOpt_dim, normal(6, 12), 2, [1])
    yield call(aten.linalg_vector_norm.default, normal(6, 12), 2, [1])
    yield call(aten.linalg_vector_norm.default, normal(6, 12))
    for op in (aten.all, aten.any):
        yield call(op.default, truth(6, 12))
        yield call(op.dim, truth(6, 12), 1)
        yield call(op.dims, truth(6, 12), [0])


def _spans() -> Iterator[Sample]:
    for op in (
        aten.softmax.int,
        aten.log_softmax.int,
        aten.cumsum.default,
        aten.cumprod.default,
        aten.logcumsumexp.default,
        aten.sort.default,
    ):
        yield call(op, normal(6, 12), -1)
        yield call(op, normal(6, 12), 0)
    yield call(aten._softmax.default, normal(6, 12), 1, False)
    yield call(aten._log_softmax.default, normal(6, 12), 0, False)
    yield call(aten.sort.stable, normal(6, 12), stable=True, dim=1)
    yield call(aten.topk.default, normal(6, 12), 2)
    yield call(aten.topk.default, normal(6, 12), 6, 0)
    yield call(aten.diff.default, normal(6, 12))
    yield call(aten.diff.default, normal(6, 12), 1, 1, normal(6, 1))
    for op in (aten.tril.default, aten.triu.default):
        yield call(op, normal(2, 6, 6), 1)
    for dim in (0, -1):
        yield call(aten.renorm.default, normal(6, 2, 4), 2, dim, 1.0)
    for op in (aten.layer_norm.default, aten.rms_norm.default):
        yield call(op, normal(2, 6, 12), [12], normal(12))
        yield call(op, normal(2, 6, 6), [6, 6])
    yield call(aten.layer_norm.default, normal(6, 12), [12], normal(12), normal(12))


def _made() -> Iterator[Sample]:
    double = {"dtype": torch.float64}
    for op, args in (
        (aten.arange.default, (6,)),
        (aten.arange.start, (1, 6)),
        (aten.arange.start_step, (0, 6, 2)),
        (aten.zeros.default, ([6],)),
        (aten.ones.default, ([6],)),
        (aten.full.default, ([6], 2.0)),
        (aten.scalar_tensor.default, (2.0,)),
        (aten.eye.default, (6,)),
        (aten.linspace.default, (0, 1, 6)),
        (aten.eye.m, (6, 4)),
        (aten.tril_indices.default, (6, 6)),
        (aten.triu_indices.default, (6, 6)),
    ):
        yield call(op, *args, **({} if "indices" in str(op) else double))
    yield call(aten.empty.memory_format, [6], values=False, **double)
    yield call(aten.new_zeros.default, normal(6, 4), [6])
    yield call(aten.new_ones.default, normal(6, 4), [6])
    yield call(aten.new_full.default, normal(6, 4), [6], 2.0)
    yield call(aten.new_empty.default, normal(6, 4), [6], values=False)
    yield call(aten.zeros_like.default, normal(6, 4))
    yield call(aten.ones_like.default, normal(6, 4))
    yield call(aten.full_like.default, normal(6, 4), 2.0)
    yield call(aten.fill.Scalar, normal(6, 4), 2.0)
    yield call(aten.empty_like.default, normal(6, 4), values=False)
    yield call(aten.one_hot.default, integer(6), 6)
    yield call(aten.one_hot.default, integer(4, 2), 6)
    yield call(aten.bucketize.Tensor, normal(6), torch.linspace(-1, 1, 6, dtype=torch.float64))
    yield call(aten.bucketize.Scalar, 0.3, torch.linspace(-1, 1, 6, dtype=torch.float64))
    yield call(aten.searchsorted.Tensor, torch.linspace(-1, 1, 6, dtype=torch.float64), normal(6))
    yield call(aten.histc.default, real(6).float(), 6)
    yield call(aten.histc.default, integer(4, 6, high=4).double(), 4, 0, 4, gradients=False)
    yield call(ours.within_capacity.default, integer(6, 2, high=4), 4, 2)


def _casts() -> Iterator[Sample]:
    for x, dtype in (
        (normal(6, 12), torch.float64),
        (normal(6, 12) * 4, torch.int64),
        (integer(6, 12), torch.float64),
        (integer(6, 12, high=2), torch.bool),
        (truth(6, 12), torch.int64),
    ):
        yield call(aten._to_copy.default, x, dtype=dtype)
        yield call(aten.to.dtype, x, dtype)
        yield call(aten.to.dtype_layout, x, dtype=dtype)
        yield call(aten.to.device, x, torch.device("cpu"), dtype)
    yield from (call(op, normal(6, 12)) for op in overloads("lift_fresh_copy"))
    yield call(aten.masked_fill.Tensor, normal(6, 12), truth(6, 12), torch.tensor(2.0, dtype=torch.float64))
    yield call(aten.clamp.Tensor, normal(6, 12), real(12), real(6, 1) + 1)
    yield call(ours.watch.default, integer(6, 4), 0.0, 100.0, None, "{found}", True)
    for op in (aten.argmax.default, aten.isnan.default, aten.isposinf.default, aten.isneginf.default):
        yield call(op, normal(6, 2))


def _selections() -> Iterator[Sample]:
    """Linear in both branches, or in one beside a zero."""
    for name in ("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar", "masked_fill.Scalar"):
        yield from pointwise(overloads(name)[0])
    yield call(aten.where.ScalarOther, truth(2, 6), normal(2, 6), 0)
    yield call(aten.where.ScalarSelf, truth(2, 6), 0.0, normal(6))
    yield call(aten.masked_fill.Scalar, normal(2, 6), truth(6), 0.0)


def _filled() -> Iterator[Sample]:
    """masked_scatter, filled_rows, placed_rows: each example has its own two rows of the source."""
    two = torch.tensor([[1, 1, 0], [0, 1, 1]]).bool()
    for rows in ((4, 6), (2, 2, 6)):
        yield call(aten.masked_scatter.default, normal(2, 3, 6), two[..., None], normal(*rows))
        yield call(aten.masked_scatter.default, normal(2, 3, 6), two[..., None].expand(2, 3, 6).clone(), normal(*rows))
    yield call(aten.masked_scatter.default, normal(2, 3, 6), two[..., None], normal(24))
    yield call(aten.masked_scatter.default, normal(2, 3, 6), two[..., None], normal(5, 6))
    for shape in ((4, 6), (4,), (4, 2, 6)):
        yield call(ours.filled_rows.default, normal(*shape), two, "{found}")
    chosen = torch.tensor([1, 0, 1, 0, 1, 1]).bool()
    for width in ((), (6,), (2, 6)):
        yield call(ours.placed_rows.default, normal(6, *width), chosen, two, "{found}")
    yield call(ours.placed_rows.default, normal(3, 2), torch.tensor([1, 1, 0]).bool(), two[0], "{found}")
    yield call(ours.filled_rows.default, normal(2, 6), torch.tensor([[1, 0, 0], [0, 1, 0]]).bool(), "{found}")
    yield call(ours.filled_rows.default, normal(3, 2, 6), torch.tensor([[1, 1, 0], [0, 1, 0]]).bool(), "{found}")
    yield call(aten.masked_scatter.default, normal(6), truth(6), normal(6))
    sent = torch.tensor([[[1, 2], [0, 1]], [[2, 1], [3, 0]]])  # by rank, of two microbatches, to each rank
    splits = torch.stack([sent, sent.transpose(0, 2)], 2)
    for back in (False, True):
        yield call(ours.dealt_rows.default, normal(2, 2, 4, 6), splits, back, 5, "dp")
    yield call(ours.watch_count.default, torch.zeros(6, 2, dtype=torch.bool), 0, "{found}")  # nothing to note


def _attention() -> Iterator[Sample]:
    for heads, kv_heads, causal in ((6, 6, True), (12, 6, False), (6, 1, True), (4, 2, True)):
        q, k, v = normal(2, heads, 3, 4), normal(2, kv_heads, 5, 4), normal(2, kv_heads, 5, 2)
        yield attention(q, k, v, causal=causal)
    q, k, v = normal(2, 6, 4, 2), normal(2, 6, 4, 2), normal(2, 6, 4, 2)
    for bias in ((2, 6, 4, 4), (1, 6, 4, 4), (1, 1, 4, 4)):
        yield attention(q, k, v, bias=normal(*bias))
    yield attention(
        q, k, v, key_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]).bool(), segments=integer(2, 4, high=2), causal=True
    )
    yield attention(q, k, v, sinks=normal(6), window=2, softcap=3.0, causal=True)
    yield attention(q, k, v, seed=torch.tensor(5), dropout=0.4, shape=[2, 6, 4, 4], causal=True)


def attention(q: Tensor, k: Tensor, v: Tensor, **facts: Any) -> Sample:
    """A call of autopar::attention with all facts but the given ones off."""
    off = {
        "bias": None,
        "key_mask": None,
        "segments": None,
        "sinks": None,
        "seed": None,
        "causal": False,
        "window": 0,
        "chunk": 0,
        "offset": 0,
        "scale": 0.5,
        "softcap": 0.0,
        "dropout": 0.0,
        "site": 1,
        "index": [],
        "shape": [],
        "documents": [],
    }
    return call(ours.attention.default, q, k, v, *({**off, **facts}.values()))


def _losses() -> Iterator[Sample]:
    for more in ((0,), (1,)):
        yield call(aten.multi_margin_loss.default, normal(6, 4), integer(6, high=4), 1, 0.5, None, *more)
    yield call(aten.multi_margin_loss.default, normal(6, 4), integer(6, high=4), 2, 1.0, real(4), 0, gradients=False)
    yield call(aten.multi_margin_loss.default, normal(6), torch.tensor(2), 1, 1.0, None, 0)
    target = torch.tensor([0, 5, -100, 11, 3, 7])
    yield call(ours.cross_entropy.default, normal(6, 12), target, -100, 0.0)
    yield call(ours.cross_entropy.default, normal(6, 12), target, -100, 0.2)
    lengths = torch.tensor([4, 3, 4, 2, 4, 4]), torch.tensor([1, 2, 0, 2, 1, 1])
    log_probs = torch.log_softmax(normal(4, 6, 3), -1).detach()
    yield call(ours.ctc_loss.default, log_probs, integer(6, 2, high=2) + 1, *lengths, 0, False)
    yield call(ours.ctc_loss.default, log_probs, integer(7, high=2) + 1, *lengths, 0, True)
    yield call(ours.dropout.default, normal(6, 12), torch.tensor(3), 0.5, 2, [], [6, 12])
    for kind, dtype in (("uniform", torch.float64), ("normal", torch.float64), ("integers", torch.int64)):
        place = torch.tensor(3), kind, 0.0, 5.0, 2, [], [6, 12], dtype
        yield call(ours.random.default, normal(6, 12), *place, gradients=False)


# Not tried alone: a getitem has the placement of the result that it takes (every sample of several results), the others
# are what localisation makes of embedding, loss and conversions (test_rules tries them on meshes of two axes), and a
# product whose scales ranks agree on (tests/zero/test_few_bits.py and test_scaled_experts.py).
PIECES = (
    attention_of_piece,
    zero_padding,
    dispatch_tokens,
    combine_tokens,
    embedding_of_piece,
    cross_entropy_of_piece,
    dealt_rows_of_rank,
    scaled_linear,
    scaled_experts,
    shift_of_piece,
    token_conv1d_of_piece,
    scan_of_piece,
)
# The parts of a model's own backward have no derivative of their own; test_autograd_function types and runs them.
BACKWARDS = (ours.gradient_of.default, ours.own_backward.default, ours.with_backward.default)
STRUCTURE = (operator.getitem, convert, exchange, exchange_slice, *PIECES, *BACKWARDS)
# Their size depends on values, so that they cannot be in a graph of fixed shapes; the rule is "run it whole".
DYNAMIC = (aten.nonzero.default, aten.unique_consecutive.default, aten.bincount.default)
ASKED = (
    torch.ops.autopar.ask_experts.default,
)  # other ranks compute it; `tests/serving/test_cut_experts.py` has its rule


def _all() -> dict[Any, list[Sample]]:
    found: dict[Any, list[Sample]] = {}
    for maker in (
        products,
        _views,
        picks,
        _reductions,
        _spans,
        spatial,
        matrices,
        diagonals,
        _made,
        _casts,
        _selections,
        _filled,
        _attention,
        _losses,
    ):
        for sample in maker():
            found.setdefault(sample.steps[0].target, []).append(sample)
    for op in EXPERTS:
        found[op] = [dispatch(), *experts()] if op == EXPERTS[0] else []
    for op, rule in RULES.items():
        if op not in found and getattr(rule, "__qualname__", "").startswith("pointwise."):
            found[op] = list(pointwise(op))
    return found


SAMPLES = _all()

"""Traits of operators. Every pass, cost and check that asks one of these questions asks it here.

Each trait is of the target of a call. A target that is not an operator (the name of a placeholder, `operator.getitem`)
has none.

    is_view, aliases, SILENT_VIEWS     whose storage a result has
    is_cheap                           recomputed rather than saved
    PERMUTED, PASSING                  no element changes
    is_elementwise                     each element of the result depends on one position of the operands
    is_fusible                         a compiler computes it within the kernel of a user
    reads_in_kernel                    a compiler computes its operands within its kernel
    PRODUCTS, CONVOLUTIONS             multiply by a weight, or may
    COLLECTIVES, SUMS, LOCAL           communicate between ranks, or replace a collective
    COPIES                             between the device and the host
    ASKS                               between the roles of attention and experts
    DROPOUTS, is_random                draw numbers
    is_choice                          returns positions of elements: experts of a token, the largest of a row
    FILLED                             created with a size, all elements alike
    SIZED                              have the sizes of their result as an argument
    FILL_VALUES                        of calls that create tensors with elements alike: the value
    STOPS_GRADIENT                     no gradient goes back through them
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from autopar.adapters.operators import OpOverload, is_composite, mutates, returns_alias
from autopar.ops import (  # noqa: F401  (registers what is named here)
    cache,
    collectives,
    cross_entropy,
    grouped_experts,
    host,
    vocab_parallel,
)
from autopar.ops.declare import CHOICES
from autopar.ops.few_bits import scaled_experts, scaled_products  # noqa: F401
from autopar.ops.gradient import GRAD_OUTPUT
from autopar.ops.token_dispatch import alltoall, alltoall_dedup, dealt_rows  # noqa: F401
from autopar.ops.token_windows import token_conv1d

aten, ours = torch.ops.aten, torch.ops.autopar

# Views that the schema does not declare: autograd can ignore them, code that overwrites or frees storage cannot.
SILENT_VIEWS = {
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
}


@functools.cache
def aliases(target: Any) -> bool:
    """Whether a result may share storage with an operand: views, operators that are views where possible (reshape, to,
    contiguous, a rank's slice), and in-place operators. Only a composite product may do so undeclared (einsum of one
    operand): step graphs contain none."""
    if not isinstance(target, OpOverload):
        return False
    return returns_alias(target) or target in SILENT_VIEWS or target is ours.shard_slice.default


@functools.cache
def is_view(target: Any) -> bool:
    """Whether no result has storage of its own, whatever the operands. Composite operators may copy where strides
    require it; they are decomposed before this matters."""
    schema = aliases(target) and not mutates(target) and not is_composite(target)
    return target in SILENT_VIEWS or (schema and target is not ours.shard_slice.default)


def is_cheap(target: Any) -> bool:
    """Whether it is recomputed rather than saved: views, which would keep their base alive anyway, and concatenations
    of values that are saved anyway."""
    return is_view(target) or target is ours.extend.default


# The same elements, dims in another order.
PERMUTED = {aten.t.default, aten.transpose.int, aten.permute.default}

# One operand, no element of which changes but in its dtype: linear, f(a + b) = f(a) + f(b).
PASSING = PERMUTED | {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten._to_copy.default,
}

_ELEMENTWISE = {  # not tagged as such by torch
    aten.clone, aten.detach, aten.alias, aten.copy_, aten._to_copy, aten.zeros_like, aten.ones_like, aten.empty_like,
    aten.full_like, aten.fill_, aten.zero_, aten.lift_fresh, aten.native_dropout, aten.contiguous,
}  # fmt: skip


def is_elementwise(target: OpOverload) -> bool:
    """Whether it runs on shards of its operands as on the whole, if they are sharded alike; includes factories of the
    operand's shape."""
    return torch.Tag.pointwise in target.tags or target.overloadpacket in _ELEMENTWISE


_NORMS = {aten.native_layer_norm.default, aten._fused_rms_norm.default}
_ROWS = {  # read in kernels, beside reductions
    aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default, aten._softmax.default,
    aten._log_softmax.default, aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
    ours.cross_entropy.default, ours.cross_entropy_backward.default, ours.piece_max.default, ours.piece_sums.default,
    ours.piece_backward.default,
}  # fmt: skip
_MOVES = {
    aten.cat.default, aten.stack.default, aten.constant_pad_nd.default, aten.repeat.default, aten.flip.default,
    aten.select_scatter.default, aten.slice_scatter.default, ours.shard_slice.default, ours.shard_pad.default,
}  # fmt: skip


@functools.cache
def is_fusible(target: Any) -> bool:
    """Whether a compiler computes it within a kernel that uses the result: element by element, elements that only move,
    and norms, whose statistics take one more read of a row."""
    if not isinstance(target, OpOverload) or mutates(target) or is_random(target):
        return False
    return is_elementwise(target) or is_view(target) or target in _NORMS or target in _MOVES


@functools.cache
def reads_in_kernel(target: Any) -> bool:
    """Whether a compiler computes its operands within its kernel, instead of writing them to memory for it."""
    return is_fusible(target) or target in _ROWS or torch.Tag.reduction in getattr(target, "tags", ())


TRANSPOSED_CONVOLUTIONS = {aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input}
CONVOLUTIONS = TRANSPOSED_CONVOLUTIONS | {
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, token_conv1d,
}  # fmt: skip
PRODUCTS = CONVOLUTIONS | {
    aten.linear.default,
    aten.matmul.default,
    aten.mm.default,
    aten.bmm.default,
    aten.mv.default,
    aten.dot.default,
    aten.addmm.default,
    aten.addmv.default,
    aten.addbmm.default,
    aten.baddbmm.default,
    aten.einsum.default,
    aten.bilinear.default,
    aten.convolution.default,
    ours.grouped_mm.default,
    ours.scaled_mm.default,
    ours.scaled_grouped_mm.default,
}

SUMS = (ours.all_reduce.default, ours.reduce_scatter.default)
COLLECTIVES = (*SUMS, ours.all_gather.default, ours.all_to_all.default, ours.all_to_all_rows.default)
LOCAL = (ours.shard_slice.default, ours.shard_pad.default)  # conversions without communication
COPIES = (ours.to_host.default, ours.from_host.default)
ASKS = (ours.ask_experts.default,)

DROPOUTS = (aten.dropout.default, aten.native_dropout.default)
# All elements of the result are alike, and depend on no operand; ``size`` is its shape.
FILLED = {
    aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
}  # fmt: skip

# Of views: the argument with the sizes of the result. SIZES: names of such arguments of any operator.
SIZED = {
    aten.view.default: "size", aten.reshape.default: "shape", aten._unsafe_view.default: "size",
    aten.expand.default: "size",
}  # fmt: skip
SIZES = ("size", "sizes", "shape", "output_size", "split_size", "split_sizes")

# Rows of a source stand at the true entries of a mask, in order. Rules assume that each example has its own rows.
IN_ORDER_OF_MASK = (aten.masked_scatter.default, torch.ops.autopar.filled_rows.default)

FILL_VALUES: dict[OpOverload, Callable[[Node], Any]] = {
    aten.full.default: lambda call: call.args[1], aten.new_full.default: lambda call: call.args[2],
    aten.full_like.default: lambda call: call.args[1],
    **dict.fromkeys((aten.ones.default, aten.new_ones.default, aten.ones_like.default), lambda call: 1),
    **dict.fromkeys((aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default), lambda call: 0),
}  # fmt: skip

STOPS_GRADIENT = (aten.detach.default, GRAD_OUTPUT, *sorted(FILLED, key=str))


_UNTAGGED = {aten._sample_dirichlet.default}


def is_random(target: Any) -> bool:
    """Whether it draws numbers from torch's generator: they would depend on how a graph is sharded."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) or target in _UNTAGGED


_CHOICES = {
    aten.topk, aten.sort, aten.argsort, aten.argmax, aten.argmin, aten.kthvalue, aten.median, aten.mode,
}  # fmt: skip


def is_choice(target: Any) -> bool:
    """Whether it returns which elements come first: a tie, or rounding, could change the answer in a recomputation."""
    packet = getattr(target, "overloadpacket", None)
    return packet in _CHOICES or packet in CHOICES

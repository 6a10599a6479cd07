"""The table: what is supported. An op without a rule is an error that names it."""

from __future__ import annotations

import operator
from typing import Any

import torch

import autopar.ops  # noqa: F401  (registers the operators that the table names)
from autopar.adapters.operators import makes_tensors, mutates, of_named_dims, packet_named
from autopar.attention.operator import attention_of_piece
from autopar.ir.conversions import convert, exchange, exchange_slice
from autopar.ir.halo import shift_of_piece, token_conv1d_of_piece
from autopar.ir.scans import scan_of_piece
from autopar.ops.few_bits.scaled_experts import scaled_experts
from autopar.ops.few_bits.scaled_products import scaled_linear
from autopar.ops.padded_pieces import zero_padding
from autopar.ops.token_dispatch import combine_tokens, dispatch_tokens
from autopar.ops.token_dispatch.dealt_rows import dealt_rows_of_rank
from autopar.ops.token_windows import shift, token_conv1d
from autopar.ops.vocab_parallel import cross_entropy_of_piece, embedding_of_piece
from autopar.rules import along_tokens as along
from autopar.rules import custom_backward as own
from autopar.rules import picks as pick
from autopar.rules import space
from autopar.rules import special as sp
from autopar.rules import views as vw
from autopar.rules.builders import (
    blocks_dims,
    einsum_of_call,
    einsum_rule,
    factory,
    filled,
    like,
    opaque,
    pointwise,
    reduction,
    words,
)
from autopar.rules.call import Call, RuleFunction
from autopar.rules.matrices import cross, diagonal, diagonal_matrices, diagonal_written, distances, matrices, solve
from autopar.rules.special import attention_rule

RULES: dict[Any, RuleFunction] = {}


def overloads(name: str) -> list[Any]:
    """Functional overloads that return tensors: 'silu' or 'autopar::attention'; 'sum.dim_IntList' names one."""
    namespace, _, rest = name.rpartition("::")
    packet_name, _, overload = rest.partition(".")
    packet = packet_named(namespace or "aten", packet_name)
    if packet is None:
        return []
    names = [overload] if overload else packet.overloads()
    found = [getattr(packet, n) for n in names]
    return [op for op in found if not mutates(op) and makes_tensors(op) and not of_named_dims(op)]


def add(names: str, rule: RuleFunction) -> None:
    """Add a rule for operators listed by name."""
    for name in words(names):
        for op in overloads(name):
            RULES[op] = rule


def _matmul(call: Call) -> Any:
    """matmul with 1-D operands has its own equations."""
    ranks = (len(call.shape("self")), len(call.shape("other")))
    left = "k" if ranks[0] == 1 else "... m k"
    right = "k" if ranks[1] == 1 else ("... k n" if ranks[1] > 2 else "k n")
    out = " ".join(
        p
        for p in (
            "..." if max(ranks) > 1 and (ranks[0] > 1 or ranks[1] > 2) else "",
            "m" if ranks[0] > 1 else "",
            "n" if ranks[1] > 1 else "",
        )
        if p
    )
    return einsum_rule(f"{left}, {right} -> {out}", "self other")(call)


def _cast(call: Call) -> Any:
    """A cast between floating types is linear; a cast to integers or bool is not."""
    before, after = call.operands[0].meta["val"].dtype, call.node.meta["val"].dtype
    exact = after.is_floating_point or after.is_complex or (before == after != torch.bool)
    scalar = not call.result  # harmless for a partial scalar: a sum of a few rounded losses
    return pointwise("unary" if exact else "", keep=scalar)(call)


# Elementwise. Those linear in their operands may pass a Partial.
add(
    "relu silu gelu tanh sigmoid exp log log2 log1p sqrt rsqrt abs sign sin cos erf reciprocal square floor ceil round "
    "softplus elu selu leaky_relu mish hardtanh hardswish hardsigmoid relu6 log_sigmoid celu clamp clamp_min clamp_max "
    "pow maximum minimum max.other min.other logaddexp logaddexp2 copysign xlogy erfc lgamma digamma asinh frac "
    "fmod remainder floor_divide atan2 isnan isinf isposinf isneginf isfinite logical_not bitwise_not trunc expm1 "
    "heaviside eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor __and__ __or__ "
    "__xor__ add.Scalar sub.Scalar rsub nan_to_num threshold hardshrink softshrink erfinv logit exp2 sgn tan asin acos "
    "atan sinh cosh atanh polygamma special_zeta div.Tensor_mode div.Scalar_mode polar complex real imag silu_backward "
    "lerp addcmul addcdiv special_laguerre_polynomial_l special_legendre_polynomial_p",
    pointwise(),
)
add("neg clone alias contiguous detach lift_fresh_copy", pointwise("unary", keep=True))
add("conj _conj_physical", pointwise("unary"))
add("_to_copy to.device to.dtype to.dtype_layout", _cast)
add("view_as_real view_as_complex", sp.complex_pairs_rule)
add("add.Tensor sub.Tensor", pointwise("sum", keep=True))
add("mul", pointwise("product"))
add("div.Tensor div.Scalar", pointwise("numerator"))
add("where.self where.ScalarOther where.ScalarSelf where.Scalar", sp.where_rule)
add("masked_fill", sp.masked_fill_rule)
add("masked_scatter", sp.masked_scatter_rule)
add("autopar::filled_rows", sp.filled_rows_rule)
add("autopar::placed_rows", sp.placed_rows_rule)
add("autopar::dealt_rows", sp.dealt_rows_rule)
add("autopar::dropout autopar::random", sp.dropout_rule)
add("autopar::gradient_of", own.grad_output)
add("autopar::own_backward", own.token)
add("autopar::with_backward", own.result)
add("autopar::watch autopar::watch_count", pointwise())

# Products.
RULES[torch.ops.aten.linear.default] = einsum_rule("... i, o i -> ... o", "input weight", bias="bias")
add("matmul", _matmul)
add("mv", einsum_rule("m k, k -> m", "self vec"))
add("dot", einsum_rule("k, k ->", "self tensor"))
add("vdot", einsum_rule("k, k ->", "self other"))
add("einsum.default", einsum_of_call)
add("conv1d.default conv2d.default conv3d.default", space.convolution_rule)
add("conv_transpose1d conv_transpose2d.input conv_transpose3d.input", space.transposed_convolution_rule)
add("autopar::grouped_mm", sp.grouped_mm_rule)
add("autopar::grouped_mm_by_offsets", sp.grouped_mm_by_offsets_rule)
add("_scaled_mm.default", sp.scaled_mm_rule)
add("autopar::grouped_bias", sp.grouped_bias_rule)
add("autopar::moe_dispatch", sp.moe_dispatch_rule)
add("autopar::moe_combine", sp.moe_combine_rule)
add("autopar::within_capacity", sp.capacity_rule)
add("autopar::ask_experts", sp.ask_experts_rule)
add("embedding", sp.embedding_rule)
add("autopar::cross_entropy", sp.cross_entropy_rule)
add("autopar::ctc_loss", sp.ctc_loss_rule)
add("autopar::attention", attention_rule)
add("multi_margin_loss", sp.multi_margin_rule)

# Rearrangements.
add("view.default reshape _unsafe_view flatten.using_ints unflatten.int unsqueeze squeeze", vw.reshape_rule)
add("permute", vw.permute_rule)
add("transpose.int", vw.transpose_rule)
add("t", vw.t_rule)
add("expand", vw.expand_rule)
add("split_with_sizes split.Tensor chunk", vw.split_rule)
add("cat", vw.cat_rule)
add("stack", vw.stack_rule)
add("select.int unbind.int", vw.dropped_dim)
add("slice.Tensor narrow.default pad constant_pad_nd roll", vw.resized_dims)
add("flip", along.flip_rule)
add("slice_scatter select_scatter", vw.scatter_into)
add("repeat_interleave.self_int", vw.repeat_interleave_rule)
add("repeat", vw.repeat_rule)
add("index_select", pick.index_select_rule)
add("gather", pick.gather_rule)
add("index.Tensor", pick.advanced_index_rule)

# Reductions and ops that span a dim.
add("sum mean", reduction(linear=True))
add(
    "amax amin prod all any argmax argmin var std logsumexp max.dim min.dim norm.ScalarOpt_dim linalg_vector_norm "
    "max.default min.default count_nonzero median nansum aminmax std_mean.correction var_mean.correction",
    reduction(linear=False),
)
add(
    "softmax.int log_softmax.int _softmax _log_softmax sort topk diff",
    blocks_dims(lambda c: [c.dim()], "the op spans it"),
)
add("cumsum cumprod logcumsumexp", along.scan_rule)
add("scatter_add", pick.scatter_add_rule)
add("histc", sp.histc_rule)
add("scatter.src scatter.value scatter_reduce.two scatter.reduce scatter.value_reduce", pick.scatter_rule)
add("one_hot", sp.one_hot_rule)
add("index_add", pick.index_add_rule)
add("index_copy", pick.index_copy_rule)
add("index_reduce", pick.index_copy_rule)
add("index_put.default", pick.index_put_rule)
add("take", pick.take_rule)
add("put", pick.put_rule)
add("renorm", blocks_dims(lambda c: [d for d in range(len(c.result)) if d != c.dim()], "the op takes the norm over it"))
add("tril triu", blocks_dims(lambda c: [len(c.shape("self")) - 2, len(c.shape("self")) - 1], "the op spans it"))
add("layer_norm rms_norm", sp.layer_norm_rule)
add("group_norm", space.group_norm_rule)
add("prelu", space.prelu_rule)
add("_prelu_kernel", pointwise())

# Matrices, and batches of them.
add(
    "linalg_inv inverse linalg_inv_ex linalg_cholesky cholesky linalg_cholesky_ex cholesky_inverse linalg_qr "
    "_linalg_svd _linalg_eigh linalg_eig _linalg_eigvals linalg_matrix_exp _linalg_det _linalg_slogdet linalg_lu "
    "linalg_lu_factor linalg_lu_factor_ex",
    matrices(2),
)
add("linalg_pinv.atol_rtol_tensor", matrices(2, 0, 0))
add("linalg_solve_triangular cholesky_solve triangular_solve", matrices(2, 2))
add("linalg_lu_solve", matrices(2, 1, 2))
add("lu_unpack linalg_householder_product", matrices(2, 1))
add("linalg_solve _linalg_solve_ex", solve)
add("linalg_cross", cross)
add("cdist", distances)
add("pdist", opaque("each row is compared with every other"))
add("diagonal diagonal_copy", diagonal)
add("diag_embed", diagonal_matrices)
add("diagonal_scatter", diagonal_written)
add("trace", opaque("a diagonal of it is summed", linear=True))
add("block_diag", opaque("each matrix has its own rows and columns", linear=True))

# Space: windows, interpolation, frequencies.
add(
    "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
    space.pooling_rule,
)
add(
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    space.resampling_rule,
)
add("unfold", space.unfold_rule)
add("im2col col2im", space.image_to_columns_rule)
add("pixel_shuffle pixel_unshuffle", space.pixel_shuffle_rule)
add("_fft_r2c _fft_c2r _fft_c2c", space.fourier_rule)

# Created from nothing, or from a shape.
add("arange scalar_tensor linspace.default eye tril_indices triu_indices", factory)
add("zeros ones full empty new_zeros new_ones new_full new_empty", filled)
add("ones_like full_like empty_like fill.Scalar", like)
add("zeros_like", pointwise("unary", keep=True))
add("bucketize searchsorted.Tensor bincount nonzero unique_consecutive", opaque("its size depends on values"))
add("embedding_bag", opaque("its bags differ in length"))

RULES[attention_of_piece] = attention_rule
RULES[dispatch_tokens], RULES[combine_tokens] = sp.moe_dispatch_rule, sp.moe_combine_rule
RULES[embedding_of_piece] = sp.embedding_rule
RULES[dealt_rows_of_rank] = sp.dealt_rows_rule
RULES[cross_entropy_of_piece] = sp.cross_entropy_rule
RULES[scaled_linear] = RULES[torch.ops.aten.linear.default]
RULES[scaled_experts] = RULES[torch.ops.autopar.grouped_mm.default]
RULES[zero_padding] = sp.zero_padding_rule
RULES[shift] = RULES[shift_of_piece] = along.shift_rule
RULES[token_conv1d] = RULES[token_conv1d_of_piece] = along.token_conv1d_rule
RULES[scan_of_piece] = along.scan_rule
RULES[operator.getitem] = sp.getitem_rule
RULES[convert] = RULES[exchange] = RULES[exchange_slice] = sp.conversion_of_other_axis

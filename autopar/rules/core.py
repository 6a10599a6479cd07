"""Rules of the operators that only step graphs have, created by differentiation. A row each, as in `table`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from autopar.rules.builders import UNARY, einsum_rule, named_dims, pointwise, words
from autopar.rules.call import Call, RuleFunction
from autopar.rules.rule import Rule
from autopar.rules.space import convolution_rule
from autopar.rules.special import (
    LinkedRule,
    attention_rule,
    block_scaled_mm_rule,
    ctc_loss_rule,
    layer_norm_rule,
    scaled_grouped_mm_rule,
)
from autopar.rules.table import RULES, overloads
from autopar.rules.views import split_rule

CORE: dict[Any, RuleFunction] = dict(RULES)
# Elementwise, and not linear. Whether the others are linear was never needed.
NEVER_LINEAR = RULES[torch.ops.aten.relu.default]
STRICT = (NEVER_LINEAR, RULES[torch.ops.aten.div.Tensor])


def _add(names: str, rule: RuleFunction) -> None:
    for name in words(names):
        CORE.update(dict.fromkeys(overloads(name), rule))


def _softmax_backward(call: Call) -> Rule:
    dims = named_dims(call, call.result)
    dim = int(call.args["dim"]) % len(dims)
    return call.rule([dims, dims], [dims], blocked={f: "the op spans it" for f in dims[dim]}, linear=UNARY)


def _addmm(call: Call) -> Rule:
    """bias (... n) + (m k) (k n): the contracted dim may not be sharded, since the bias would be added once per rank;
    but ranks may add partial products to a partial gradient."""
    m, k, n = (
        call.factor("m", call.result[0]),
        call.factor("k", call.shape("mat1")[1]),
        call.factor("n", call.result[1]),
    )
    bias = (m, n)[2 - len(call.shape("self")) :]
    if call.of_step:
        both = frozenset({0, 1}), frozenset({0, 2})
        return call.rule([bias, (m, k), (k, n)], [(m, n)], addends=dict.fromkeys([0], *k) if k else {}, linear=both)
    return call.rule(
        [bias, (m, k), (k, n)], [(m, n)], blocked=dict.fromkeys(k, "the bias would be added once per rank")
    )


def _embedding_backward(call: Call) -> Rule:
    """(... h), (...) -> (v h): the gradients of equal indices are added."""
    ids = named_dims(call, call.shape("indices"), "i")
    v, h = call.factor("v", call.result[0]), call.factor("h", call.result[1])
    return call.rule([(*ids, h), ids], [(v, h)], blocked=dict.fromkeys(v, "it writes to any row"), linear=UNARY)


def _part_backward(call: Call) -> Rule:
    """The gradient of a slice, or of single entries, padded with zeros."""
    dims = named_dims(call, call.result)
    dim = int(call.args["dim"]) % len(dims)
    given = (
        *dims[:dim],
        *([call.factor("part", call.shape("grad_output")[dim])] if "end" in call.args else []),
        *dims[dim + 1 :],
    )
    return call.rule([given], [dims], blocked={f: "it is a slice" for f in (*dims[dim], "part")}, linear=UNARY)


def _spanning(equation: str, names: str, spanned: str = "") -> RuleFunction:
    """Like `einsum_rule`, with factors that the operator spans; linear in the gradient, the first operand."""

    def build(call: Call) -> Rule:
        rule = einsum_rule(equation, names)(call)
        padding = [None] * (len(call.operands) - len(rule.operands))  # which columns are none is each rank's own
        operands = (*rule.operands, *padding)
        return replace(rule, operands=operands, blocked=dict.fromkeys(spanned, "the op spans it"), linear=UNARY)

    return build


def _piece(equation: str, names: str, spanned: str = "") -> RuleFunction:
    """Over a rank's classes: ``index`` is per rank, whatever shard of the logits it has."""

    def build(call: Call) -> Rule:
        rule = _spanning(equation, names, spanned)(call)
        i = call.operands.index(call.args["index"])
        return replace(rule, operands=(*rule.operands[:i], None, *rule.operands[i + 1 :]))

    return build


def _piece_max(call: Call) -> Rule:
    return replace(_spanning("n c -> n", "logits", "c")(call), linear=())


def _largest(call: Call) -> Rule:
    """Spans dims, which stay with size one."""
    dims = named_dims(call, call.shape("x"))
    spanned = call.args["dims"]
    result = tuple(() if i in spanned else dim for i, dim in enumerate(dims))
    return call.rule([dims], [result], blocked={f: "the op spans it" for i in spanned for f in dims[i]})


def _layer_norm(call: Call) -> Rule:
    rule = layer_norm_rule(call)
    (dims,) = rule.results
    assert dims is not None
    lead = tuple(dim if not set(dim) & set(rule.blocked) else () for dim in dims)  # type: ignore[arg-type]
    return replace(rule, results=(dims, lead, lead))


def _layer_norm_backward(call: Call) -> Rule:
    rule = _layer_norm(call)
    dims, lead, _ = rule.results
    norm = dims[len(dims) - len(call.args["normalized_shape"]) :]
    operands = (dims, dims, lead, lead, *rule.operands[1:])
    return replace(rule, operands=operands, results=(dims, norm, norm), linear=UNARY)


def _convolution_backward(call: Call) -> Rule:
    rule = convolution_rule(replace(call, result_shapes=(call.shape("grad_output"),)))
    source, weight = rule.operands
    (made,) = rule.results
    assert source is not None and weight is not None
    return replace(rule, operands=(made, source, weight), results=(source, weight, (made[1],)), linear=UNARY)


def _ctc_loss_backward(call: Call) -> Rule:
    rule = ctc_loss_rule(replace(call, result_shapes=(call.shape("grad"),)))
    return replace(rule, operands=(*rule.results, *rule.operands), results=(rule.operands[0],), linear=UNARY)  # type: ignore[arg-type]


def _context_attention(call: Call) -> Rule:
    """Queries and keys that are sharded on the algorithm's axis are sharded together."""
    rule = attention_rule(call)
    if call.args.get("axis") != call.axis:
        return rule
    return LinkedRule(**{**vars(rule), "blocked": {f: why for f, why in rule.blocked.items() if f not in "st"}})


def _attention_backward(call: Call) -> Rule:
    rule = _context_attention(replace(call, result_shapes=(call.shape("grad"), call.shape("lse"))))
    out, lse = rule.results
    names = [n for n in ("bias", "key_mask", "segments", "sinks", "seed") if isinstance(call.args.get(n), Node)]
    optional = dict(zip(names, rule.operands[3:]))
    made = {n: call.result_shapes[i] != (0,) for i, n in ((3, "bias"), (4, "sinks"))}
    results = [*rule.operands[:3], *(optional.get(n) if there else () for n, there in made.items())]
    known = (out, *rule.operands[:3], out, lse, *rule.operands[3 : 3 + len(names)])
    operands = (*known, *[None] * (len(call.operands) - len(known)))
    return replace(rule, operands=operands, results=tuple(dims or () for dims in results), linear=UNARY)


_add("mm", einsum_rule("m k, k n -> m n", "self mat2"))
_add("bmm", einsum_rule("b m k, b k n -> b m n", "self mat2"))
_add("addmm", _addmm)
_add(
    "threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward softplus_backward elu_backward "
    "leaky_relu_backward hardtanh_backward hardswish_backward hardsigmoid_backward log_sigmoid_backward "
    "mish_backward native_dropout_backward",
    pointwise("numerator"),
)
# Linear in a way that rules cannot say; or applied to gradients by derivatives that are linear as a whole.
_add(
    "rsub xlogy lerp addcmul addcdiv complex real imag polar abs sign sgn eq ne lt le gt ge isnan isinf isfinite "
    "logical_not logical_and logical_or clamp clamp_min clamp_max maximum minimum max.other min.other copysign",
    pointwise(),
)
_add("autopar::watch autopar::scale_of autopar::delayed_scale autopar::quantized", NEVER_LINEAR)
_add("autopar::largest", _largest)
_add("autopar::scaled_mm", block_scaled_mm_rule)
_add("autopar::scaled_grouped_mm", scaled_grouped_mm_rule)
_add("_softmax_backward_data _log_softmax_backward_data", _softmax_backward)
_add("embedding_dense_backward", _embedding_backward)
_add("split_with_sizes_copy", split_rule)
_add("native_layer_norm", _layer_norm)
_add("native_layer_norm_backward", _layer_norm_backward)
_add("convolution", convolution_rule)
_add("convolution_backward", _convolution_backward)
_add("slice_backward select_backward", _part_backward)
_add("autopar::cross_entropy_backward", _spanning("n, n c, n, n -> n c", "grad logits target lse", "c"))
_add("autopar::piece_max", _piece_max)
_add("autopar::piece_sums", _piece("n c, n, n -> k n", "logits index top"))
_add("autopar::piece_backward", _piece("n, n c, n, n -> n c", "grad logits index lse"))
_add("autopar::ctc_loss_backward", _ctc_loss_backward)
_add("autopar::context_attention", _context_attention)
_add("autopar::attention_backward autopar::context_attention_backward", _attention_backward)

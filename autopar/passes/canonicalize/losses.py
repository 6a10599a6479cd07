"""Losses: one value per example by simple operators, then sum, count and quotient as ordinary operators.

This makes the reduction visible: the loss of a sharded batch is a sum of local sums over a sum of local counts.
"""

from __future__ import annotations

from operator import getitem as _getitem
from typing import Any

import torch
from torch.fx import Node

from autopar.ir.graph import arguments, has_gradient
from autopar.rewrite.build import Build, Rewrite, calls, operand, shape_of, value_of

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2  # torch's codes of `reduction`
_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_TINY = float(torch.tensor(1e-12, dtype=torch.float32))  # torch uses a float32 constant for all dtypes


def _reduced(build: Build, x: Node, reduction: int) -> Node:
    if reduction == _NONE:
        return x
    return build(aten.mean.default if reduction == _MEAN else aten.sum.default, x)


def cross_entropy_loss(node: Node, build: Build) -> Node | None:
    """cross_entropy_loss(x, t) --> loss = cross_entropy(x, t, -100, 0.0)[0]; div(sum(loss), sum(ne(t, -100)))"""
    known = arguments(node)
    x, target = known["self"], known["target"]
    if value_of(target).is_floating_point():
        return _soft_targets(node, build)
    narrow, flat = _before_widening(x), _rows(build, x)
    target_flat = build.reshape(target, (value_of(target).numel(),))
    smoothing, weight = float(known["label_smoothing"]), known["weight"]
    apart = bool(smoothing) and weight is not None  # the smoothed term needs its own class weights
    fused = torch.ops.autopar.cross_entropy.default
    both = build(
        fused,
        flat if narrow is None else build.reshape(narrow, shape_of(flat)),
        target_flat,
        known["ignore_index"],
        0.0 if apart else smoothing,
    )
    smoothed = _weighted_smoothing(build, flat, target_flat, known) if apart else None
    return _finish(node, build, build(_getitem, both, 0), target_flat, smoothed)


def _before_widening(x: Node) -> Node | None:
    """Logits as the model has them, where they are cast to float32 for this loss alone, which computes in float32
    itself: they are neither written nor kept in float32."""
    classes = shape_of(x)[-1:] if len(shape_of(x)) == 2 else None
    while calls(x, *_RESHAPES) and shape_of(operand(x))[-1:] == classes and len(x.users) == 1:
        x = operand(x)
    if not calls(x, aten._to_copy.default) or len(x.users) > 1 or value_of(x).dtype != torch.float32 or not classes:
        return None
    narrow = operand(x)
    return narrow if value_of(narrow).dtype in (torch.float16, torch.bfloat16) else None


def _weighted_smoothing(build: Build, rows: Node, flat: Node, known: dict[str, Any]) -> tuple[float, Node]:
    """(the factor of the label's own loss, the term of all classes: s / C * sum(neg(weight * log_softmax)), 0 where the
    label is ignored)"""
    smoothing = float(known["label_smoothing"])
    logs = build(aten.mul.Tensor, build(aten.log_softmax.int, rows, 1), known["weight"])
    total = build(aten.mul.Tensor, build(aten.sum.dim_IntList, logs, [1]), -smoothing / shape_of(rows)[1])
    ignored = build(aten.eq.Scalar, flat, known["ignore_index"])
    return 1.0 - smoothing, build(aten.masked_fill.Scalar, total, ignored, 0.0)


def _finish(node: Node, build: Build, loss: Node, flat: Node, smoothed: tuple[float, Node] | None = None) -> Node:
    """Class weights, reduction, shape and dtype of a per-row loss. ``smoothed``: see `_weighted_smoothing`."""
    known = arguments(node)
    ignore, weight, reduction = known["ignore_index"], known["weight"], known["reduction"]
    counted = build(aten.ne.Scalar, flat, ignore)
    shares = counted
    if weight is not None:
        safe = build(aten.mul.Tensor, flat, counted)
        shares = build(aten.mul.Tensor, build(aten.index_select.default, weight, 0, safe), counted)
        loss = build(aten.mul.Tensor, loss, shares)
    if smoothed is not None:
        loss = build(aten.add.Tensor, build(aten.mul.Tensor, loss, smoothed[0]), smoothed[1])
    out_type = value_of(node).dtype
    if reduction == _NONE:
        return build.cast(build.reshape(loss, shape_of(node)), out_type)
    total = build(aten.sum.default, loss)
    if reduction == _MEAN:
        total = build(aten.div.Tensor, total, _watched(build, build(aten.sum.default, shares), ignore))
    return build.cast(total, out_type)


def _watched(build: Build, count: Node, ignore: int) -> Node:
    """The number of labels that count, with a check that it is not 0."""
    if has_gradient(count):  # class weights that are learned
        return count
    text = f"no label counts (all are {ignore}, or their classes have no weight), so the mean loss is 0/0 = nan"
    return build(torch.ops.autopar.watch.default, count, 1e-30, float("inf"), None, text, False)


def _rows(build: Build, x: Node) -> Node:
    """[C], [N, C] or [N, C, d1, ...] --> [N * d1 * ..., C]"""
    shape = shape_of(x)
    if len(shape) > 2:
        x = build(aten.permute.default, x, [0, *range(2, len(shape)), 1])
    classes = shape[1] if len(shape) > 1 else shape[0]
    return build.reshape(x, (value_of(x).numel() // classes, classes))


def _soft_targets(node: Node, build: Build) -> Node:
    """cross_entropy_loss(x, probabilities) --> div(neg(sum(mul(log_softmax(x), probabilities))), rows)"""
    known = arguments(node)
    x, target, smoothing = known["self"], known["target"], known["label_smoothing"]
    dim = min(1, len(shape_of(x)) - 1)
    if smoothing:
        target = build(aten.mul.Tensor, target, 1.0 - smoothing)
        target = build(aten.add.Tensor, target, smoothing / shape_of(x)[dim])
    terms = build(aten.mul.Tensor, build(aten.log_softmax.int, x, dim), target)
    if known["weight"] is not None:
        shape = [-1 if d == dim else 1 for d in range(len(shape_of(x)))]
        sizes = [shape_of(x)[dim] if s == -1 else 1 for s in shape]
        terms = build(aten.mul.Tensor, terms, build.reshape(known["weight"], sizes))
    loss = build(aten.neg.default, build(aten.sum.dim_IntList, terms, [dim]))
    if known["reduction"] == _MEAN:
        rows = value_of(loss).numel()
        return build(aten.div.Tensor, build(aten.sum.default, loss), rows)
    return _reduced(build, loss, known["reduction"])


def nll_loss(node: Node, build: Build) -> Node | None:
    """nll_loss(logp, t) --> as cross_entropy_loss with loss = neg(gather(logp, t)), 0 where ignored;
    nll_loss(log_softmax(x), t) --> cross_entropy_loss(x, t)"""
    known = arguments(node)
    x, target = known["self"], known["target"]
    flat, target_flat = _rows(build, x), build.reshape(target, (value_of(target).numel(),))
    ignore = known["ignore_index"]
    if calls(x, aten.log_softmax.int) and len(shape_of(x)) == 2 and arguments(x)["dim"] % 2 == 1:
        both = build(torch.ops.autopar.cross_entropy.default, operand(x), target_flat, ignore, 0.0)
        return _finish(node, build, build(_getitem, both, 0), target_flat)
    ignored = build(aten.eq.Scalar, target_flat, ignore)
    index = build(aten.unsqueeze.default, build(aten.masked_fill.Scalar, target_flat, ignored, 0), 1)
    chosen = build(aten.neg.default, build(aten.squeeze.dim, build(aten.gather.default, flat, 1, index), 1))
    return _finish(node, build, build(aten.masked_fill.Scalar, chosen, ignored, 0.0), target_flat)


def nll_loss_forward(node: Node, build: Build) -> Node | None:
    """getitem(nll_loss_forward(logp, t, ...), 0) --> as nll_loss"""
    for user in list(node.users):
        if calls(user, _getitem) and user.args[1] == 0:
            out = nll_loss(_Renamed(node, user), build)  # type: ignore[arg-type]
            assert out is not None
            user.replace_all_uses_with(out)
            build.at.graph.erase_node(user)
    return None


class _Renamed:
    """A `nll_loss_forward` node in the role of its first output."""

    def __init__(self, node: Node, first: Node) -> None:
        self.target, self.args, self.kwargs = node.target, node.args, node.kwargs
        self.meta, self.name, self.op = first.meta, node.name, node.op


def mse_loss(node: Node, build: Build) -> Node | None:
    """mse_loss(x, y) --> d = sub(x, y); mean(mul(d, d))"""
    difference = _difference(node, build)
    return _reduced(build, build(aten.mul.Tensor, difference, difference), arguments(node)["reduction"])


def l1_loss(node: Node, build: Build) -> Node | None:
    """l1_loss(x, y) --> mean(abs(sub(x, y)))"""
    return _reduced(build, build(aten.abs.default, _difference(node, build)), arguments(node)["reduction"])


def _difference(node: Node, build: Build) -> Node:
    known = arguments(node)
    return build(aten.sub.Tensor, known["self"], known["target"])


def smooth_l1_loss(node: Node, build: Build) -> Node | None:
    """smooth_l1_loss(x, y, beta) --> d = abs(sub(x, y)); mean(where(d < beta, d * d / (2 beta), d - beta / 2))"""
    beta = arguments(node)["beta"]
    return l1_loss(node, build) if beta == 0 else _knee(node, build, beta, 0.5 / beta, 1.0)


def huber_loss(node: Node, build: Build) -> Node | None:
    """huber_loss(x, y, delta) --> d = abs(sub(x, y)); mean(where(d < delta, d * d / 2, delta * (d - delta / 2)))"""
    delta = arguments(node)["delta"]
    return _knee(node, build, delta, 0.5, delta)


def _knee(node: Node, build: Build, knee: float, square: float, slope: float) -> Node:
    size = build(aten.abs.default, _difference(node, build))
    below = build(aten.lt.Scalar, size, knee)
    small = build(aten.where.ScalarOther, below, size, 0.0)  # not infinite: 0 times its gradient would be nan
    inner = build(aten.mul.Tensor, build(aten.mul.Tensor, small, small), square)
    outer = build(aten.mul.Tensor, build(aten.sub.Tensor, size, 0.5 * knee), slope)
    chosen = build(aten.where.self, below, inner, outer)
    return _reduced(build, chosen, arguments(node)["reduction"])


def bce_with_logits(node: Node, build: Build) -> Node | None:
    """binary_cross_entropy_with_logits(x, y) --> mean(sub((1 - y) * x, log_sigmoid(x)))"""
    known = arguments(node)
    x, y = known["self"], known["target"]
    keep = build(aten.mul.Tensor, build(aten.rsub.Scalar, y, 1), x)
    logs = build(aten.log_sigmoid.default, x)
    if known["pos_weight"] is not None:
        excess = build(aten.mul.Tensor, build(aten.sub.Tensor, known["pos_weight"], 1), y)
        logs = build(aten.mul.Tensor, build(aten.add.Tensor, excess, 1), logs)
    return _weighted(build, build(aten.sub.Tensor, keep, logs), known)


def binary_cross_entropy(node: Node, build: Build) -> Node | None:
    """binary_cross_entropy(x, y) --> mean(loss + (x - detach(x)) * slope), where nothing but x has a gradient, and
    loss = neg(y * clamp(log(x), -100) + (1 - y) * clamp(log(1 - x), -100)), slope = (x - y) / clamp(x * (1 - x), 1e-12)

    The gradient is torch's own formula: that of the logarithms is infinite where a probability is 0 or 1.
    """
    known = arguments(node)
    x, y = known["self"], known["target"]
    p, t = (build(aten.detach.default, v) for v in (x, y))
    yes = build(aten.clamp.default, build(aten.log.default, p), -100.0)
    no = build(aten.clamp.default, build(aten.log1p.default, build(aten.neg.default, p)), -100.0)
    rest = build(aten.rsub.Scalar, p, 1)
    left = build(aten.mul.Tensor, t, yes)
    right = build(aten.mul.Tensor, build(aten.rsub.Scalar, t, 1), no)
    loss = build(aten.neg.default, build(aten.add.Tensor, left, right))
    width = build(aten.clamp.default, build(aten.mul.Tensor, p, rest), _TINY)
    slope = build(aten.div.Tensor, build(aten.sub.Tensor, p, t), width)
    loss = build(aten.add.Tensor, loss, build(aten.mul.Tensor, build(aten.sub.Tensor, x, p), slope))
    if has_gradient(y):  # as torch: of logarithms that are not clamped, but finite
        turn = build(aten.sub.Tensor, build(aten.log.default, rest), build(aten.log.default, p))
        most = torch.finfo(value_of(y).dtype).max
        turn = build(aten.clamp.default, turn, -most, most)
        loss = build(aten.add.Tensor, loss, build(aten.mul.Tensor, build(aten.sub.Tensor, y, t), turn))
    return _weighted(build, loss, known)


def _weighted(build: Build, loss: Node, known: dict[str, Any]) -> Node:
    if known["weight"] is not None:
        loss = build(aten.mul.Tensor, loss, known["weight"])
    return _reduced(build, loss, known["reduction"])


def kl_div(node: Node, build: Build) -> Node | None:
    """kl_div(x, y) --> mean(xlogy(y, y) - y * x); with log_target: mean(exp(y) * (y - x))"""
    known = arguments(node)
    x, y = known["self"], known["target"]
    if known["log_target"]:
        loss = build(aten.mul.Tensor, build(aten.exp.default, y), build(aten.sub.Tensor, y, x))
        return _reduced(build, loss, known["reduction"])
    loss = build(aten.sub.Tensor, build(aten.xlogy.Tensor, y, y), build(aten.mul.Tensor, y, x))
    return _reduced(build, loss, known["reduction"])


def reduced_apart(node: Node, build: Build) -> Node | None:
    """multi_margin_loss(x, y, reduction=mean) --> mean(multi_margin_loss(x, y, reduction=none))"""
    known = arguments(node)
    if known["reduction"] == _NONE:
        return None
    return _reduced(build, build(node.target, *(known | {"reduction": _NONE}).values()), known["reduction"])  # type: ignore[arg-type]


def soft_margin_loss(node: Node, build: Build) -> Node | None:
    """soft_margin_loss(x, y) --> mean(log1p(exp(neg(x) * y)))"""
    known = arguments(node)
    power = build(aten.mul.Tensor, build(aten.neg.default, known["self"]), known["target"])
    return _reduced(build, build(aten.log1p.default, build(aten.exp.default, power)), known["reduction"])


TABLE: dict[Any, Rewrite] = {
    aten.multi_margin_loss.default: reduced_apart,
    aten.multilabel_margin_loss.default: reduced_apart,
    aten.soft_margin_loss.default: soft_margin_loss,
    aten.cross_entropy_loss.default: cross_entropy_loss,
    aten.nll_loss.default: nll_loss,
    aten.nll_loss_nd.default: nll_loss,
    aten.nll_loss2d.default: nll_loss,
    aten.nll_loss_forward.default: nll_loss_forward,
    aten.nll_loss2d_forward.default: nll_loss_forward,
    aten.mse_loss.default: mse_loss,
    aten.l1_loss.default: l1_loss,
    aten.smooth_l1_loss.default: smooth_l1_loss,
    aten.huber_loss.default: huber_loss,
    aten.binary_cross_entropy_with_logits.default: bce_with_logits,
    aten.binary_cross_entropy.default: binary_cross_entropy,
    aten.kl_div.default: kl_div,
}

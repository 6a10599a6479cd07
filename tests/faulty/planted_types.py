"""Faults in what the types know: rules, conversions, placements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

import autopar.compile.parameters
import autopar.ir.conversions
import autopar.passes.partition.lower_to_local as localize
from autopar.ir.conversions import is_conversion
from autopar.ir.graph import set_placement
from autopar.ir.mesh import Mesh
from autopar.ir.placement import INVARIANT, PARTIAL, REPLICATE, Invariant, Partial, Replicate, Shard
from autopar.rules import Rule
from autopar.rules.builders import blocks_dims, einsum_rule, named_dims, pointwise, reduction
from autopar.rules.call import Call
from tests.faulty.planted import (
    calls,
    set_outputs,
)
from tests.faulty.planted_table import in_code, in_rule, in_types, patched

aten, ours = torch.ops.aten, torch.ops.autopar


# --- rules --------------------------------------------------------------------------------------------------


def _relaxed(call: Call) -> Rule:
    call.relaxed = True
    return einsum_rule("... i, o i -> ... o", "input weight", bias="bias")(call)


def _rows_anywhere(call: Call) -> Rule:
    rows, width = call.shape("weight")
    ids = named_dims(call, call.shape("indices"), "i")
    v, h = call.factor("v", rows), call.factor("h", width)
    return call.rule([(v, h), ids], [(*ids, h)])


def _copies_first(call: Call) -> Rule:
    dim, shape = call.dim(), call.shape("self")
    dims = named_dims(call, shape)
    call.sizes["repeat"] = call.result[dim] // shape[dim]
    return call.rule([dims], [tuple(("repeat", *d) if i == dim else d for i, d in enumerate(dims))])


def _norm(call: Call) -> Rule:
    dims = named_dims(call, call.shape("input"))
    n = len(call.args["normalized_shape"])
    names = [x for x in ("weight", "bias") if isinstance(call.args.get(x), Node)]
    return call.rule([dims, *(dims[len(dims) - n :] for _ in names)], [dims])


in_rule("the bias of a product is added on every rank", aten.linear.default, _relaxed)
in_rule("relu of a partial value is taken for partial", aten.relu.default, pointwise("unary"))
in_rule("a product is linear in both factors jointly", aten.mul.Tensor, pointwise("sum"))
in_rule("a sum is linear in each addend separately", aten.add.Tensor, pointwise("product"))
in_rule("a quotient is linear in its denominator", aten.div.Tensor, pointwise("product"))
in_rule("softmax over a sharded dim", aten.softmax.int, blocks_dims(lambda c: [], ""))
in_rule("a running sum over a sharded dim", aten.cumsum.default, blocks_dims(lambda c: [], ""))
in_rule("a maximum is summed over the ranks", aten.amax.default, reduction(linear=True))
in_rule("a norm over sharded channels", aten.layer_norm.default, _norm)
in_rule("each rank flips its own shard", aten.flip.default, pointwise("unary"))
in_rule("rows of an embedding sharded in several blocks", aten.embedding.default, _rows_anywhere)
in_rule("copies of entries are laid out by copy", aten.repeat_interleave.self_int, _copies_first)
in_rule("a cast of a partial value to integers", aten._to_copy.default, pointwise("unary"))


# --- conversions --------------------------------------------------------------------------------------------

_run, _transpose, _exchange_over = (
    autopar.ir.conversions.run_conversion,
    autopar.ir.placement.transpose,
    localize.exchange_over,
)


def _unsummed(src: Any, dst: Any) -> Any:
    return (REPLICATE, REPLICATE) if isinstance(src, Invariant) and isinstance(dst, Replicate) else _transpose(src, dst)


def _sliced(src: Any, dst: Any) -> Any:
    return (INVARIANT, src) if isinstance(src, Shard) and isinstance(dst, Replicate) else _transpose(src, dst)


def _summed_again(src: Any, dst: Any) -> Any:
    return (PARTIAL, INVARIANT) if isinstance(src, Partial) and isinstance(dst, Invariant) else _transpose(src, dst)


def _largest(x: torch.Tensor, axis: str, size: int, src: Any, dst: Any) -> Any:
    summed = isinstance(src, Partial) and isinstance(dst, Invariant)
    return ours.all_reduce(x, axis, "max") if summed else _run(x, axis, size, src, dst)


def _not_scattered(x: torch.Tensor, axis: str, size: int, src: Any, dst: Any) -> Any:
    """A slice of this rank's own addend."""
    kept = isinstance(src, Partial) and isinstance(dst, Shard)
    return _run(x, axis, size, INVARIANT if kept else src, dst)


def _repeated(x: torch.Tensor, axis: str, size: int, src: Any, dst: Any) -> Any:
    """Copies of this rank's piece in place of everybody's."""
    gathered = isinstance(src, Shard) and isinstance(dst, (Replicate, Invariant))
    return torch.cat([x] * size, src.dim) if gathered else _run(x, axis, size, src, dst)


def _other_axis(mesh: Mesh, x: Any, axis: str, src: Any, dst: Any) -> Any:
    swapped = {"dp": "tp", "tp": "dp"}.get(axis, axis) if isinstance(src, Partial) else axis
    return _exchange_over(mesh, x, swapped, src, dst)


for _name, _subject, _owner, _attribute, _value in (
    ("I to R sums no gradient", "ddp", autopar.ir.conversions, "transpose", _unsummed),
    ("S to R slices its own gradient", "zero", autopar.ir.conversions, "transpose", _sliced),
    ("P to I sums the gradient again", "tp", autopar.ir.conversions, "transpose", _summed_again),
    ("P to I takes the maximum", "ddp", autopar.ir.conversions, "run_conversion", _largest),
    ("P to S slices without a sum", "zero", autopar.ir.conversions, "run_conversion", _not_scattered),
    ("S to R repeats its own shard", "zero", autopar.ir.conversions, "run_conversion", _repeated),
    ("reductions run over the other axis", "both", localize, "exchange_over", _other_axis),
):
    in_code("conversions", _name, "step checks", _subject, patched(_owner, _attribute, _value))


# --- propagation --------------------------------------------------------------------------------------------


def _conversions(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if is_conversion(n)]


def _drop(text: str, src: str = "I") -> Callable[[GraphModule], None]:
    def change(gm: GraphModule) -> None:
        node = next(n for n in _conversions(gm) if text in str(n.args[0]) and n.args[2] == src)
        node.replace_all_uses_with(node.args[0])

    return change


def _drop_sum(gm: GraphModule) -> None:
    node = next(n for n in _conversions(gm) if n.args[2] == "P")
    node.replace_all_uses_with(node.args[0])


def _retarget(gm: GraphModule) -> None:
    """A partial value that is marked as one whose gradient is partial, too."""
    node = next(n for n in _conversions(gm) if n.args[2:] == ("P", "I"))
    node.args = (*node.args[:3], "R")


def _mark_stored(gm: GraphModule) -> None:
    set_placement(next(n for n in gm.graph.nodes if n.name.endswith("up_weight")), "tp", INVARIANT)


def _mark_product(gm: GraphModule) -> None:
    set_placement(calls(gm, aten.linear.default)[0], "tp", REPLICATE)


def _unsummed_loss(gm: GraphModule) -> None:
    set_outputs(gm, lambda values: [values[0].args[0], *values[1:]])


in_types("a norm's gradient is not summed over dp", "ddp", _drop("norm"))
in_types("an embedding's gradient is not summed over dp", "ddp", _drop("embed"))
in_types("a partial product is used as a value", "tp", _drop_sum)
in_types("a summed value is taken for one with a partial gradient", "tp", _retarget)
in_types("a parameter is not stored as planned", "tp", _mark_stored)
in_types("a sharded product is marked replicated", "tp", _mark_product)
in_types("the loss is returned before it is reduced", "ddp", _unsummed_loss)

_mark = autopar.ir.graph.mark_gradients
_no_mean = {k: v for k, v in localize.LOCALIZERS.items() if "mean" not in str(k)}
in_code(
    "propagation", "norms are treated as frozen", "types", "ddp",
    patched(
        autopar.compile.parameters, "mark_gradients", lambda gm, names: _mark(gm, [n for n in names if "norm" not in n])
    ),
)  # fmt: skip
in_code("propagation", "a mean is over each rank's rows", "numbers", "ddp", patched(localize, "LOCALIZERS", _no_mean))

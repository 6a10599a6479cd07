"""Local types of a call's results from those of its operands: collectives by meaning, other operators by rule."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from autopar.ir.graph import arguments, is_call
from autopar.ops.traits import COLLECTIVES, COPIES, LOCAL, is_random
from autopar.rules.core import CORE, STRICT
from autopar.rules.local_types import (
    ADDENDS,
    ANY,
    PART,
    SAME,
    UNKNOWN,
    WHOLE,
    Joined,
    LocalCall,
    LocalType,
    constant_held,
    is_unknown,
    is_vague,
    rows_in_piece,
    through,
    viewed,
    with_single_rows,
)
from autopar.rules.rule import RuleError
from autopar.rules.views import cat_rule, reshape_rule, split_rule

aten, ours = torch.ops.aten, torch.ops.autopar
_FILLED = (
    aten.zeros, aten.ones, aten.full, aten.empty, aten.scalar_tensor, aten.zeros_like, aten.ones_like, aten.full_like,
    aten.empty_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten._efficientzerotensor,
)  # fmt: skip


def held_results(node: Node, axis: str, size: int, operands: list[LocalType]) -> list[LocalType]:
    """The local type of every result of a call in a step graph; empty where its operands are not shards of one value.
    ``size``: of the axis."""
    val = node.meta["val"]
    shapes = [_shape(r) for r in (val if isinstance(val, (tuple, list)) else [val])]
    try:
        made = _results(node, axis, size, operands, shapes)
    except (RuleError, LookupError, ValueError, ArithmeticError):  # rules for calls of the forward may not cover this
        made = [UNKNOWN] * len(shapes)
    return list(map(with_single_rows, made, shapes))


def _results(
    node: Node, axis: str, size: int, operands: list[LocalType], shapes: list[tuple[int, ...]]
) -> list[LocalType]:
    if is_call(node, ours.all_to_all_rows.default):
        return [UNKNOWN]  # a data-dependent choice of rows
    if is_call(node, ours.shard_slice.default) and shapes == [(1,)] and not node.meta["val"].is_floating_point():
        return [UNKNOWN]  # a number of the rank, as that of its first row: it moves what it is subtracted from
    if node.target in COLLECTIVES or node.target in LOCAL:
        return [_exchanged(node, axis, operands[0])]
    if is_call(node, ours.quantized.default) and operands[0] == ADDENDS:
        return [frozenset()]  # addends must not be rounded
    if is_call(node, ours.delayed_scale.default):
        return [WHOLE]  # ranks have agreed on it in an earlier step
    if node.target in COPIES:
        return operands[:1]
    if getattr(node.target, "overloadpacket", None) in _FILLED:
        known = arguments(node)
        zero = "zero" in str(node.target) or known.get("fill_value", known.get("s")) == 0
        return [constant_held(len(shapes[0]), zero)]
    build = CORE.get(node.target)
    if is_random(node.target) or build is None:
        whole = not is_random(node.target) and all(held == WHOLE for held in operands)
        return [WHOLE if whole else UNKNOWN] * len(shapes)
    if is_call(node, aten.convolution.default, aten.convolution_backward.default) and _has_halo(operands):
        return [UNKNOWN] * len(shapes)
    call = LocalCall(node, lambda x: tuple(x.meta["val"].shape), tuple(shapes), axis, of_step=True)
    if build is reshape_rule:
        return [viewed(operands[0], call.shape_of(call.operands[0]), call.result)]
    if build is split_rule and (parts := _parted(call, operands[0])):
        return parts
    made = through(build(call), operands, strict=build in STRICT)
    if not all(made) and all(held == WHOLE or is_vague(held) for held in operands):
        return [UNKNOWN] * len(shapes)
    if build is cat_rule and len(set(operands)) > 1:
        return [_joined(call, operands, made[0])]
    if is_call(node, aten.bmm.default) and call.shape("self")[2] == 1 and PART in made[0]:
        return [UNKNOWN]  # torch.einsum contracts dims of size one, sharded or not
    if is_call(node, aten.sum.dim_IntList) and call.args["keepdim"] and axis == "cp" and is_vague(operands[0]):
        return [UNKNOWN]  # a scan sends the totals of a rank's own rows, which are shards (`autopar.ir.scans`)
    if is_call(node, aten.index_add.default) and PART in made[0]:
        return [UNKNOWN]  # the rows of a microbatch, added within this rank's shard, look like any others
    if (is_call(node, aten.slice.Tensor) or _crops_halo(node, axis)) and not is_unknown(made[0]):
        # of a concatenation of shards, a rank has a shard of each operand: one of them is a slice of its result
        dim = int(call.args["dim"]) % len(call.result)
        return [made[0] | {(dim, 0) for x in operands[0] if isinstance(x, tuple) and x[0] == dim}]
    if is_call(node, aten.expand.default) and SAME in made[0]:
        return [made[0] | {(d, None) for d, n in enumerate(call.result) if n == 1}]
    if is_call(node, aten.div.Tensor, aten.div.Scalar) and node.args[1] == size and SAME in made[0]:
        return [made[0] | {PART}]  # equal copies are addends once divided by their number
    return made


def _shape(result: Any) -> tuple[int, ...]:
    return tuple(result.shape) if isinstance(result, torch.Tensor) else ()


def _has_halo(operands: list[LocalType]) -> bool:
    """Whether a convolution may slide along a sharded dim, over a rank's tokens and rows of its neighbours."""
    return any(isinstance(x, tuple) and x[0] > 1 for held in operands[:2] for x in held)


def _crops_halo(node: Node, axis: str) -> bool:
    """Whether a gradient may be that of a rank's tokens without the rows of its neighbours."""
    return axis == "cp" and is_call(node, aten.slice_backward.default)


def _joined(call: LocalCall, operands: list[LocalType], made: LocalType) -> LocalType:
    """A concatenation whose operands have a common type, or one that is to be split later."""
    dim = int(call.args["dim"]) % len(call.result)
    sizes = [call.shape_of(x)[dim] for x in call.operands]
    return made | {Joined(dim, tuple(zip(sizes, operands, strict=True)))}


def _parted(call: LocalCall, held: LocalType) -> list[LocalType]:
    """The entries of a concatenation that is split as it was joined."""
    for x in held:
        if isinstance(x, Joined) and [size for size, _ in x.parts] == [r[x.dim] for r in call.result_shapes]:
            return [part for _, part in x.parts]
    return []


def _exchanged(node: Node, axis: str, held: LocalType) -> LocalType:
    """The result of a collective; empty if the collective does not apply to its operand."""
    found: set[Any] = set()
    for x in held:
        if isinstance(x, Joined):
            parts = tuple((size, _exchanged(node, axis, part)) for size, part in x.parts)
            found |= {Joined(x.dim, parts)} if all(part for _, part in parts) else set()
        else:
            found |= _converted(node, axis, x)
    return frozenset(found)


def _converted(node: Node, axis: str, x: Any) -> LocalType:
    known, kind = arguments(node), node.target
    if axis not in known["axis"].split(","):
        level = known["axis"].startswith(axis)  # of neighbours on this axis, or of every n-th rank
        return UNKNOWN if x == ANY or level else frozenset({_of_other_axis(node, x)})

    def piece(dim: int, blocks: list[int]) -> LocalType:
        return frozenset({(dim, rows_in_piece(blocks, node.meta["val"].shape[dim]))})

    along = isinstance(x, tuple) and x[0] == known.get("dim", known.get("src_dim"))
    if kind is ours.all_reduce.default:
        right, made = (x == PART) == (known["op"] == "sum"), WHOLE
    elif kind is ours.all_to_all.default:
        right, made = along, piece(known["dst_dim"], known["dst_blocks"])
    elif kind is ours.all_gather.default:
        right, made = along, WHOLE
    elif kind is ours.shard_pad.default:
        right, made = along, ADDENDS
    else:
        right, made = x == (PART if kind is ours.reduce_scatter.default else SAME), piece(known["dim"], known["blocks"])
    return made if right or x == ANY else frozenset()


def _of_other_axis(node: Node, x: Any) -> Any:
    """A dim of changed size that was complete stays complete; otherwise its position is unknown."""
    if isinstance(x, str):
        return x
    before, after = node.all_input_nodes[0].meta["val"].shape[x[0]], node.meta["val"].shape[x[0]]
    return (x[0], x[1] if before == after or x[1] is None else after if x[1] == before else 0)

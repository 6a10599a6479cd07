"""routed_sizes: sizes that depend on how many tokens are routed to a rank are read at run time.

Consumes    a joint graph whose shapes assume that every rank receives the same number of rows.
Guarantees  no such number is a constant of the graph: each is replaced by the size of an operand of the same call.
Leaves      graphs without routed rows. A size that no operand has is an error.

    d = slice_backward(g, [128, 64], 1, 0, 32, 1)
        -->
    n = sym_size(g, 0); d = slice_backward(g, [n, 64], 1, 0, 32, 1)

The results of `moe_dispatch_own` except the offsets are routed, and so is everything computed from them row by row,
gradients included. The gradient of that dispatch has a row per token it was given: where the tokens came from other
ranks, their number is read at run time too.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.ir.expert_layers import dispatch_of
from autopar.ir.graph import arguments, calls_of, describe, insert_call, is_call, set_argument, tensor_operands, values
from autopar.ir.meta import inherit

aten, ours = torch.ops.aten, torch.ops.autopar
_ENDS = (  # take rows, and return none
    ours.moe_combine.default, ours.moe_dispatch_backward.default, ours.grouped_mm_weight_grad.default,
    ours.grouped_sum.default, ours.largest_by_group.default, ours.scaled_grouped_mm_weight_grad.default,
)  # fmt: skip
_ROWS = {ours.moe_dispatch_own.default: (0, 1), ours.moe_combine_backward.default: (0,)}  # results that are rows
_SHAPES = ("size", "sizes", "shape", "input_sizes", "self_sizes", "input_size")  # arguments: of the result
_BESIDE = (  # take other operands beside rows
    ours.grouped_mm.default, ours.grouped_bias.default, ours.all_to_all_rows.default, ours.unsorted_rows.default,
    ours.sorted_rows.default, ours.scaled_grouped_mm.default, ours.quantized_by_group.default,
)  # fmt: skip


def routed_sizes(gm: GraphModule) -> None:
    """See the module's docstring. Raises ValueError for an operand beside routed rows whose row count is unknown."""
    routed: dict[Node, int] = {}
    starts = calls_of(gm.graph, *_ROWS, ours.moe_dispatch_backward.default, ours.add_copies.default)
    for node in list(gm.graph.nodes) if starts else ():
        if is_call(node, operator.getitem) and node.args[0].target in _ROWS:
            source, number = node.args
            if number in _ROWS[source.target] and _is_routed(source, routed):
                routed[node] = node.meta["val"].shape[0]
        elif is_call(node, operator.getitem):
            if node.args[0] in routed:
                routed[node] = routed[node.args[0]]
        elif is_call(node, ours.moe_dispatch_backward.default):
            _ask_who_came(node)
        elif is_call(node, ours.add_copies.default):
            _ask_who_went(node)
        elif node.op == "call_function" and node.target not in (*_ENDS, *_ROWS):
            _visit(node, routed)
    if routed:
        gm.recompile()


def _is_routed(source: Node, routed: dict[Node, int]) -> bool:
    return is_call(source, ours.moe_dispatch_own.default) or any(x in routed for x in source.all_input_nodes)


def _ask_who_came(node: Node) -> None:
    """The gradient of a dispatch has a row per token that the dispatch was given."""
    dispatch = dispatch_of(node)
    if is_call(dispatch, ours.moe_dispatch_own.default):
        given = tensor_operands(dispatch)  # tokens, and their experts
        if is_call(given[0], ours.all_to_all_rows.default):
            set_argument(node, "tokens", _asked(given[1], node))


def _ask_who_went(node: Node) -> None:
    """Sums of copies have a row per token that was sent: read at run time where tokens came from other ranks."""
    copies = arguments(node)["sent"].args[0]
    expert = arguments(copies)["expert"]
    if is_call(expert, ours.all_to_all_rows.default):
        set_argument(node, "tokens", _asked(expert, node))


def _visit(node: Node, routed: dict[Node, int]) -> None:
    given = [x for x in tensor_operands(node) if x in routed]
    if not given:
        return
    rows, made = routed[given[0]], values(node)
    of_rows = [x.shape[:1] == (rows,) for x in made]
    if not any(of_rows):
        return  # a sum over rows
    if not all(of_rows):
        raise ValueError(f"experts: {describe(node)} turns the rows of a rank's experts into something without rows")
    routed[node] = rows
    _refuse_counts_beside(node, rows, routed)
    for name, x in arguments(node).items():
        if name in _SHAPES and isinstance(x, (list, tuple)) and list(x) == list(made[0].shape):
            set_argument(node, name, [_asked(given[0], node), *x[1:]])


def _asked(x: Node, user: Node) -> Node:
    """The number of rows of x, for ``user``: computed in the layer of x, though only a backward may use it."""
    size = insert_call(user, aten.sym_size.int, (x, 0), like=x, val=x.meta["val"].shape[0])
    inherit(size, x, ("call",))
    return size


def _refuse_counts_beside(node: Node, rows: int, routed: dict[Node, int]) -> None:
    if node.target in _BESIDE:
        return
    for x in tensor_operands(node):
        shape = x.meta["val"].shape
        if x not in routed and len(shape) == node.meta["val"].dim() and shape[:1] == (rows,) and rows > 1:
            raise ValueError(
                f"experts: {describe(node)} takes {x.name} with {rows} rows together with the rows of a rank's "
                "experts, whose number is known at run time only; compute it from these rows"
            )


# --- upper bounds on routed rows -----------------------------------------------------------------------

Most = tuple[int | None, ...]  # one bound per result


def most_rows(gm: GraphModule) -> None:
    """Set ``meta["most_rows"]`` (one number or None per result) on every value with a row per routed row or per copy of
    a token: the largest number of rows that any routing can give it.

        rows = moe_dispatch_own(x, expert, 2, 64)       64 if routing is even; at most tokens x min(K, 2)

    Each value has its own bound: one rank may send the most copies while another receives the most rows.
    """
    if not any(is_call(node, ours.moe_dispatch_own.default) for node in gm.graph.nodes):
        return
    for node in gm.graph.nodes:
        if node.op == "call_function":
            found = _of(node)
            if any(found):
                node.meta["most_rows"] = found


def _rows(x: Node) -> int:
    """The upper bound of a value with rows."""
    noted = x.meta.get("most_rows", (None,))[0]
    return int(x.meta["val"].shape[0] if noted is None else noted)


def _of(node: Node) -> Most:
    if is_call(node, operator.getitem):
        source, i = node.args
        return (source.meta["most_rows"][i],) if "most_rows" in source.meta else (None,)  # type: ignore[union-attr]
    args = arguments(node)
    if is_call(node, ours.moe_copies.default):
        return _gone(node), None
    if is_call(node, ours.all_to_all_rows.default):
        if args["rows"]:
            return (None,)
        asked = _asked_most(args["splits"])
        return (_gone(asked) if args["back"] else _come(asked),)
    if is_call(node, ours.experts_of_rows.default):
        return (_come(_asked_most(args["splits"])),)
    if is_call(node, ours.moe_dispatch_own.default):
        rows = _rows(args["expert"]) * min(_width(args["expert"]), args["experts"])
        return rows, rows, None
    if is_call(node, ours.moe_combine.default):
        return (_noted(args["weights"]),)
    if is_call(node, ours.moe_combine_backward.default):
        return _noted(args["rows"]), _noted(args["weights"])
    if is_call(node, ours.moe_dispatch_backward.default):
        return (_noted(tensor_operands(dispatch_of(node))[0]),)
    if is_call(node, ours.add_copies.default):
        return (_noted(arguments(args["sent"].args[0])["expert"]),)
    given = [(x.meta["val"].shape[:1], _noted(x)) for x in tensor_operands(node) if _noted(x)]  # row by row
    return tuple(next((most for rows, most in given if v.shape[:1] == rows), None) for v in values(node))


def _noted(x: Any) -> int | None:
    found: int | None = x.meta.get("most_rows", (None,))[0]
    return found


def _asked_most(splits: Node) -> Node:
    """The call that decided which rows go to which rank."""
    asked: Node = arguments(splits)["counts"].args[0]
    return asked


def _width(expert: Node) -> int:
    shape = expert.meta["val"].shape
    return int(shape[1]) if len(shape) > 1 else 1


def _gone(asked: Node) -> int:
    """The most rows that leave a rank, those to itself included."""
    expert, ranks = arguments(asked)["expert"], arguments(asked)["ranks"]
    if is_call(asked, ours.moe_pairs.default):
        return _rows(expert) * _width(expert)
    return _rows(expert) * min(_width(expert), int(ranks))


def _come(asked: Node) -> int:
    """The most rows that a rank receives: all of them."""
    expert, ranks, experts = (arguments(asked)[name] for name in ("expert", "ranks", "experts"))
    each = min(_width(expert), experts // ranks) if is_call(asked, ours.moe_pairs.default) else 1
    return int(_rows(expert) * ranks * each)

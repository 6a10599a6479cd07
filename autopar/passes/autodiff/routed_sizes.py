"""routed_sizes: sizes of rows that a rank's experts get are asked of the rows.

Consumes    a joint graph, whose shapes say how many rows a rank would get if all got as many.
Guarantees  no number of them is written into it: where a size was, the size of the call's own operand stands.
Leaves      graphs without routed rows. A number that nobody can be asked about is an error.

    d = slice_backward(g, [128, 64], 1, 0, 32, 1)
        -->
    n = sym_size(g, 0); d = slice_backward(g, [n, 64], 1, 0, 32, 1)

Routed is what `moe_dispatch_own` returns but for the offsets, and all that is made of it row by row, gradients too. The
gradient of that dispatch has a row for each token that it was given: where these came from other ranks, they are asked.
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
    ours.grouped_sum.default,
)  # fmt: skip
_ROWS = {ours.moe_dispatch_own.default: (0, 1), ours.moe_combine_backward.default: (0,)}  # results that are rows
_SHAPES = ("size", "sizes", "shape", "input_sizes", "self_sizes", "input_size")  # arguments: of the result
_BESIDE = (  # take something else beside rows
    ours.grouped_mm.default, ours.grouped_bias.default, ours.all_to_all_rows.default, ours.unsorted_rows.default,
    ours.sorted_rows.default,
)  # fmt: skip


def routed_sizes(gm: GraphModule) -> None:
    """See the module's docstring. Raises ValueError for a value beside rows of which nobody knows its rows."""
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
    """The gradient of a dispatch has a row per token that it was given."""
    dispatch = dispatch_of(node)
    if is_call(dispatch, ours.moe_dispatch_own.default):
        given = tensor_operands(dispatch)  # tokens, and their experts
        if is_call(given[0], ours.all_to_all_rows.default):
            set_argument(node, "tokens", _asked(given[1], node))


def _ask_who_went(node: Node) -> None:
    """Sums of copies have a row per token that was sent on: a number to ask for where these came from other ranks."""
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
        raise ValueError(f"experts: {describe(node)} makes something else of the rows of a rank's experts than rows")
    routed[node] = rows
    _refuse_counts_beside(node, rows, routed)
    for name, x in arguments(node).items():
        if name in _SHAPES and isinstance(x, (list, tuple)) and list(x) == list(made[0].shape):
            set_argument(node, name, [_asked(given[0], node), *x[1:]])


def _asked(x: Node, user: Node) -> Node:
    """How many rows x has, for ``user``: a fact of the layer that x is of, though only a backward may ask for it."""
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
                f"experts: {describe(node)} takes {x.name} of {rows} rows beside the rows of a rank's experts, whose "
                "number is known when they are there; make it of these rows"
            )


# --- the most tokens that a rank may be sent -----------------------------------------------------------

Most = tuple[int | None, ...]  # of each result


def most_rows(gm: GraphModule) -> None:
    """Note on every value with a row per routed row, or per copy of a token that goes or came, how many they may be if
    routing sends a rank as many as it can (``meta["most_rows"]``, one number or None per result).

        rows = moe_dispatch_own(x, expert, 2, 64)       64 if routing is even; at most tokens x min(K, 2)

    A bound for each value by itself: copies that go may be many on one rank, and rows on another.
    """
    if not any(is_call(node, ours.moe_dispatch_own.default) for node in gm.graph.nodes):
        return
    for node in gm.graph.nodes:
        if node.op == "call_function":
            found = _of(node)
            if any(found):
                node.meta["most_rows"] = found


def _rows(x: Node) -> int:
    """At most, of a value with rows."""
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
    """The call that chose which rows go to whom."""
    asked: Node = arguments(splits)["counts"].args[0]
    return asked


def _width(expert: Node) -> int:
    shape = expert.meta["val"].shape
    return int(shape[1]) if len(shape) > 1 else 1


def _gone(asked: Node) -> int:
    """Rows that leave a rank, those to itself included."""
    expert, ranks = arguments(asked)["expert"], arguments(asked)["ranks"]
    if is_call(asked, ours.moe_pairs.default):
        return _rows(expert) * _width(expert)
    return _rows(expert) * min(_width(expert), int(ranks))


def _come(asked: Node) -> int:
    """Rows that come to a rank if all are for it."""
    expert, ranks, experts = (arguments(asked)[name] for name in ("expert", "ranks", "experts"))
    each = min(_width(expert), experts // ranks) if is_call(asked, ours.moe_pairs.default) else 1
    return int(_rows(expert) * ranks * each)

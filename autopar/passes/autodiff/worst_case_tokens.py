"""most_rows: how many rows of tokens a value has if routing sends a rank as many as it can.

Consumes    a joint graph whose shapes are those of even routing.
Guarantees  every value with a row per routed row, or per copy of a token that goes or came, has noted how many they may
            be (``meta["most_rows"]``, one number or None per result); step graphs keep the note.
Leaves      everything else; graphs without experts that are cut.

    rows = moe_dispatch_own(x, expert, 2, 64)       64 if routing is even; at most tokens x min(K, 2)

A bound for each value by itself: copies that go may be many on one rank, and rows on another.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.ir.expert_layers import dispatch_of
from autopar.ir.graph import arguments, is_call, tensor_operands, values

ours = torch.ops.autopar
Most = tuple[int | None, ...]  # of each result


def most_rows(gm: GraphModule) -> None:
    """See the module's docstring."""
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
        asked = _asked(args["splits"])
        return (_gone(asked) if args["back"] else _come(asked),)
    if is_call(node, ours.experts_of_rows.default):
        return (_come(_asked(args["splits"])),)
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
    return _as_operands(node)


def _noted(x: Any) -> int | None:
    found: int | None = x.meta.get("most_rows", (None,))[0]
    return found


def _as_operands(node: Node) -> Most:
    """Made row by row of rows."""
    given = [(x.meta["val"].shape[:1], _noted(x)) for x in tensor_operands(node) if _noted(x)]
    return tuple(next((most for rows, most in given if v.shape[:1] == rows), None) for v in values(node))


def _asked(splits: Node) -> Node:
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

"""Residual streams: where sequence parallelism starts, and which values belong to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import cache

from torch.fx import GraphModule, Node

from autopar.ir.graph import arguments, getitem_index, shape_on, tensor_operands
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard, scaled_blocks
from autopar.plan import Stream
from autopar.rules import Rule, RuleError, has_rule, rule_of
from autopar.rules.rule import Dims


def stream_labels(gm: GraphModule, streams: tuple[Stream, ...], mesh: Mesh, axis: str) -> dict[Node, Shard]:
    """The sequence dim of every value of an axis' streams of tokens, as the Shard on it."""
    by_name = {n.name: n for n in gm.graph.nodes}
    labels: dict[Node, Shard] = {}
    for stream in streams:
        if stream.axis == axis and not (stream.rows or stream.channels):
            start = start_of(stream, by_name)
            blocks = scaled_blocks(stream.blocks, shape_on(start, axis, mesh)[stream.dim])
            shard = Shard(stream.dim, blocks, units=stream.units)
            for node, label in spread_label(start, shard, mesh, axis, inputs=axis == "cp").items():
                labels.setdefault(node, label)
    return labels


def start_of(stream: Stream, by_name: Mapping[str, Node]) -> Node:
    """The value at which a stream starts. Raises ValueError for a plan of another graph."""
    name, _, operand = stream.node.partition(".")
    if name not in by_name:
        raise ValueError(f"plan: the stream's start {stream.node!r} is not in this graph; make a plan for it")
    node = by_name[name]
    start: Node = arguments(node)[operand] if operand else node
    return start


def spread_label(
    start: Node, shard: Shard, mesh: Mesh, axis: str, inputs: bool = False, barred: Collection[Node] = ()
) -> dict[Node, Shard]:
    """Follow one dim through ops that treat its entries independently. Ops that mix them (attention, norms over it) end
    it; so do ``barred`` values, and placeholders, unless ``inputs``: two projections of one input read the same
    tokens."""
    labels = {start: shard}
    queue = deque([start])
    ranks = mesh.pieces(axis)

    @cache  # a call is reached from each of its operands and results
    def relaxed_rule(call: Node) -> Rule:
        return rule_of(call, axis, mesh, relaxed=True)

    def may_carry(node: Node) -> bool:
        return node not in labels and node not in barred and (inputs or node.op != "placeholder")

    def spread(call: Node, place: Callable[[Rule], Dims | None], value: Shard) -> None:
        operands, several = tensor_operands(call), isinstance(call.meta["val"], (list, tuple))
        made = {u: i for u in call.users if (i := getitem_index(u)) is not None} if several else {call: 0}
        if not any(map(may_carry, (*operands, *made))):
            return
        rule = relaxed_rule(call)
        dims = place(rule)
        if dims is None:
            return
        try:
            cut = rule.completed(rule.cut_of(dims, value, ranks))
            of_operands = [None if d is None else rule.shard_of(d, cut) for d in rule.operands]
            of_results = [rule.shard_of(d, cut) for d in rule.results]
        except RuleError:
            return
        if of_results[0] is None:
            return  # contracted
        results = [(node, of_results[i]) for node, i in made.items()]
        for node, label in (*zip(operands, of_operands, strict=True), *results):
            if label is not None and may_carry(node):
                labels[node] = label
                queue.append(node)

    while queue:
        node = queue.popleft()
        index = getitem_index(node)
        maker = node if index is None else node.args[0]
        if isinstance(maker, Node) and maker.op == "call_function" and has_rule(maker):
            spread(maker, lambda rule, i=index or 0: rule.results[i], labels[node])  # type: ignore[misc]
        for user in node.users:
            if user.op == "call_function" and has_rule(user) and getitem_index(user) is None:
                for i, x in enumerate(tensor_operands(user)):
                    if x is node:
                        spread(user, lambda rule, i=i: rule.operands[i], labels[node])  # type: ignore[misc]
    return labels

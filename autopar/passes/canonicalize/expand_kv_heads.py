"""expand_kv_heads: repeat key and value heads where a tensor parallel axis does not divide them.

Consumes    a canonical global graph; reads only the mesh.
Guarantees  every attention's kv heads divide over the tp axis where repeating them within their groups can make it so.
            If they come from a fused projection, the projection is split, so that its query part can still be
            sharded.
Leaves      the result: a query head attends to its own kv head. Each rank slices what it needs, and the gradients of
            the copies are summed.

    attention(q, k, v)      -->    attention(q, repeat_interleave(k, 2, 1), repeat_interleave(v, 2, 1))   # 2 kv
    heads, tp=4

    q, k, v = split(linear(x, w), [32, 16, 16])
                            -->    wq, wk, wv = split(w, [32, 16, 16]); q = linear(x, wq); k = ...; v = ...
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import arguments, insert_call, is_call, reach, remove_dead_code, set_argument, shape
from autopar.rewrite.build import Build
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass

aten = torch.ops.aten


class ExpandKvHeads(Pass):
    """Repeats kv heads until they divide over tp."""

    name = "expand_kv_heads"
    requires = ("functional",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        ranks = ctx.mesh.size("tp")
        for node in list(gm.graph.nodes):
            if not is_call(node, torch.ops.autopar.attention.default):
                continue
            args = arguments(node)
            times = repeats(shape(args["q"])[1], shape(args["k"])[1], ranks)
            if times > 1:
                for name in ("k", "v"):
                    _take_apart(args[name])
                    set_argument(node, name, _repeated(node, arguments(node)[name], times))
        remove_dead_code(gm)
        gm.recompile()
        return gm


def repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """How often to repeat each kv head: the least divisor of the group size that makes them divide over the ranks. If
    none does, that with which a rank projects the fewest heads, of shards that are padded; 1 if the query heads of a
    single kv head (MQA) can be sharded without it."""
    group = heads // kv_heads
    possible = [r for r in range(1, group + 1) if group % r == 0]
    fitting = [r for r in possible if (kv_heads * r) % ranks == 0]
    if kv_heads == 1:
        return 1
    return fitting[0] if fitting else min(possible, key=lambda r: _projected(group, kv_heads, ranks, r))


def _projected(group: int, kv_heads: int, ranks: int, times: int) -> int:
    """Heads that a rank projects: queries and outputs, keys and values. Those of repeated kv heads are replicated."""
    queries = -(-kv_heads * times // ranks) * group // times
    return 2 * queries + 2 * (kv_heads if times > 1 else -(-kv_heads // ranks))


def _repeated(node: Node, x: Node, times: int) -> Node:
    return insert_call(node, aten.repeat_interleave.self_int, (x, times, 1), like=x, name=f"{x.name}_repeated")


def _take_apart(x: Node) -> None:
    """If a value is a slice of a fused projection's result, split the projection's weight instead of its result."""
    # what was computed from the projection is not a slice of it
    made = list(reach([x], lambda n: () if is_call(n, aten.linear.default) else n.all_input_nodes))
    for node in (n for n in made if is_call(n, aten.linear.default)):
        split = next((u for u in node.users if is_call(u, aten.split_with_sizes.default)), None)
        last = len(shape(node)) - 1
        if split is not None and len(node.users) == 1 and arguments(split)["dim"] % (last + 1) == last:
            _split_weight(node, split)


def _split_weight(linear: Node, split: Node) -> None:
    args, sizes, call = arguments(linear), list(arguments(split)["split_sizes"]), Build(linear)
    weights = call(aten.split_with_sizes.default, args["weight"], sizes, 0)
    biases = call(aten.split_with_sizes.default, args["bias"], sizes, 0) if args["bias"] is not None else None
    for part in list(split.users):
        i = part.args[1]
        bias = call(operator.getitem, biases, i) if biases is not None else None
        new = call(aten.linear.default, args["input"], call(operator.getitem, weights, i), bias)
        part.replace_all_uses_with(new)
        part.graph.erase_node(part)

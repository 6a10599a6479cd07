"""expand_kv_heads: repeat key and value heads where a tensor parallel axis has more ranks than there are kv heads.

Consumes    a normalised global graph; reads only the mesh.
Guarantees  every attention's kv heads divide over the tp axis where repeating them can make it so.
Leaves      the result: a query head still attends to its own kv head. Each rank then slices what it needs, and
            the gradients of the copies are summed.

    attention(q, k, v)      -->    attention(q, repeat_interleave(k, 2, 1), repeat_interleave(v, 2, 1))   # 2 kv heads, tp=4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from autopar.graph import arguments, insert_call, is_call, set_argument, shape
from autopar.pass_manager import Context


@dataclass(frozen=True)
class ExpandKvHeads:
    """Repeats kv heads to the number of ranks."""

    name: ClassVar[str] = "expand_kv_heads"
    requires: ClassVar[tuple[str, ...]] = ("functional",)
    ensures: ClassVar[tuple[str, ...]] = ()

    def apply(self, gm: GraphModule, ctx: Context) -> GraphModule:
        ranks = ctx.mesh.size("tp")
        for node in list(gm.graph.nodes):
            if not is_call(node, torch.ops.autopar.attention.default):
                continue
            args = arguments(node)
            heads, kv_heads = shape(args["q"])[1], shape(args["k"])[1]
            if kv_heads % ranks and ranks % kv_heads == 0 and heads % ranks == 0 and kv_heads > 1:
                for name in ("k", "v"):
                    set_argument(node, name, _repeated(gm, node, args[name], ranks // kv_heads))
        gm.recompile()
        return gm


def _repeated(gm: GraphModule, node: Node, x: Node, times: int) -> Node:
    op = torch.ops.aten.repeat_interleave.self_int
    val = x.meta["val"].repeat_interleave(times, 1)
    return insert_call(gm.graph, node, op, (x, times, 1), x, val, f"{x.name}_repeated")

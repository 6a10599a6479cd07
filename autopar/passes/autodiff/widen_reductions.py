"""widen_reductions: gradients are summed over ranks in the dtype of a policy, not in the one they were computed in.

Consumes    a joint graph, whose gradients end in sums over ranks, and behind these in the cast back to what the
            parameter is stored in.
Guarantees  a gradient is cast before the first of these sums, on whatever axes they are, and leaves in that dtype.
Leaves      sums of activations over tp or cp, which are part of the computation; graphs where no dtype differs.

    g = mm(dy, x); r = all_reduce(g, "dp"); return _to_copy(r, float32)
        -->
    g = mm(dy, x); c = _to_copy(g, float32); return all_reduce(c, "dp")

1 + 2^-10 over two ranks is 1.0 where bfloat16 is summed (Micikevicius et al. 2018, 3.3, on accumulation in float32).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import insert_call, is_call, output_node
from autopar.ops.traits import PASSING, SUMS

CAST = torch.ops.aten._to_copy.default


def behind_sums(gradient: Node, whole: bool = False) -> tuple[Node, list[Node]]:
    """(what a rank or a microbatch has computed of a gradient by itself, the sums over ranks, casts and views between
    it and the gradient): of calls that lead to nothing else, from the first sum or cast on. ``whole``: behind sums
    that leave all of the value on every rank only."""
    own, chain, behind = gradient, list[Node](), list[Node]()
    x = gradient
    while is_call(x, *SUMS, *PASSING) and isinstance(x.args[0], Node) and len(x.users) == 1:
        if whole and is_call(x, torch.ops.autopar.reduce_scatter.default):
            break
        behind.append(x)
        if is_call(x, *SUMS, CAST):
            own, chain = x.args[0], behind[::-1]
        x = x.args[0]
    return own, chain


def widen_reductions(gm: GraphModule, dtypes: Sequence[torch.dtype | None]) -> None:
    """``dtypes``: of each result of the graph, what it is summed and leaves in; None leaves it as it is."""
    out = output_node(gm)
    results = list(out.args[0])  # type: ignore[arg-type]
    for i, dtype in enumerate(dtypes):
        if isinstance(results[i], Node) and dtype is not None:
            results[i] = _widened(out, results[i], dtype)
    out.args = (tuple(results),)
    gm.recompile()


def _widened(out: Node, gradient: Node, dtype: torch.dtype) -> Node:
    own, chain = behind_sums(gradient)
    sums = [node for node in chain if not is_call(node, CAST)]
    if all(node.meta["val"].dtype == dtype for node in (own, *chain)):
        return gradient
    last = own if own.meta["val"].dtype == dtype else _cast(own, dtype)
    for node in sums:
        last.append(node)
        node.update_arg(0, last)
        node.meta["val"] = node.meta["val"].to(dtype)
        last = node
    return last


def _cast(node: Node, dtype: torch.dtype) -> Node:
    """Right behind it."""
    return insert_call(node.next, CAST, (node,), {"dtype": dtype}, like=node, val=node.meta["val"].to(dtype))

"""widen_reductions: gradients are reduced over ranks in the policy's dtype, not in the dtype they were computed in.

Consumes    a joint graph whose gradients end in reductions over ranks, followed by the cast to the dtype in which the
            parameter is stored.
Guarantees  a gradient is cast before the first of these reductions, on whatever axis, and leaves in that dtype.
Leaves      reductions of activations over tp or cp, which belong to the computation; graphs where the dtypes agree.

    g = mm(dy, x); r = all_reduce(g, "dp"); return _to_copy(r, float32)
        -->
    g = mm(dy, x); c = _to_copy(g, float32); return all_reduce(c, "dp")

1 + 2^-10 over two ranks is 1.0 when reduced in bfloat16 (Micikevicius et al. 2018, 3.3, on accumulation in float32).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import insert_call, is_call, output_node
from autopar.ops.traits import PASSING, SUMS

CAST = torch.ops.aten._to_copy.default


def behind_sums(gradient: Node, whole: bool = False) -> tuple[Node, list[Node]]:
    """(the addend of a gradient that one rank or microbatch computes, the reductions, casts and views between it and
    the gradient). Only calls with a single user count, from the first reduction or cast on. ``whole``: only reductions
    after which every rank has the whole value."""
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
    """``dtypes``: per result of the graph, the dtype in which it is reduced and returned; None leaves it as it is."""
    out = output_node(gm)
    results = list(out.args[0])  # type: ignore[arg-type]
    for i, dtype in enumerate(dtypes):
        if isinstance(results[i], Node) and dtype is not None:
            results[i] = _widened(results[i], dtype)
    out.args = (tuple(results),)
    gm.recompile()


def _widened(gradient: Node, dtype: torch.dtype) -> Node:
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
    """A cast right after the node."""
    return insert_call(node.next, CAST, (node,), {"dtype": dtype}, like=node, val=node.meta["val"].to(dtype))

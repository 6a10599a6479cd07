"""shared_counts: ranks tell each other once per layer how many copies of tokens go to whom.

Consumes    a joint graph, in which the dispatch and the combine of a layer both ask for it.
Guarantees  calls that say which copies go where, how many, and whose experts they are for are one where they are of the
            same experts: those of `row_splits` and all integers that it is made of.
Leaves      everything else.

    a = moe_copies(e); c = all_to_all(a1); s = row_splits(a1, c)
    b = moe_copies(e); d = all_to_all(b1); t = row_splits(b1, d)    -->    (a, c and s, for all users)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import ancestors, frozen, is_call, values
from autopar.ops.traits import is_random

ours = torch.ops.autopar


def shared_counts(gm: GraphModule) -> None:
    """See the module's docstring."""
    counts = ancestors([node for node in gm.graph.nodes if is_call(node, ours.row_splits.default)])
    seen: dict[Any, Node] = {}
    for node in list(gm.graph.nodes):
        asked = node in counts or (is_call(node, operator.getitem) and node.args[0] in counts)
        if asked and _is_whole_numbers(node):
            first = seen.setdefault((node.target, *(frozen(x, lambda x: x) for x in (node.args, node.kwargs))), node)
            if first is not node:
                node.replace_all_uses_with(first)
                gm.graph.erase_node(node)


def _is_whole_numbers(node: Node) -> bool:
    """Whether a call makes integers, and the same ones each time."""
    if node.op != "call_function" or is_random(node.target):
        return False
    return all(not x.is_floating_point() and not x.is_complex() for x in values(node))

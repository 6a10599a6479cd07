"""shared_counts: ranks tell each other once per layer how many copies of tokens go to whom.

Consumes    a joint graph, in which the dispatch and the combine of a layer both ask for it.
Guarantees  calls that say which copies go where, and how many, are one where they are of the same experts.
Leaves      everything else.

    a = moe_copies(e); c = all_to_all(a1); s = row_splits(a1, c)
    b = moe_copies(e); d = all_to_all(b1); t = row_splits(b1, d)    -->    (a, c and s, for all users)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import frozen, is_call

ours = torch.ops.autopar
_ASKED = (ours.moe_copies.default, ours.row_splits.default)


def shared_counts(gm: GraphModule) -> None:
    """See the module's docstring."""
    seen: dict[Any, Node] = {}
    counts: set[Node] = set()
    for node in list(gm.graph.nodes):
        of_counts = is_call(node, operator.getitem, ours.all_to_all.default) and node.args[0] in counts
        if not of_counts and not is_call(node, *_ASKED):
            continue
        first = seen.setdefault((node.target, frozen(node.args, lambda x: x)), node)
        counts.add(first)
        if first is not node:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)

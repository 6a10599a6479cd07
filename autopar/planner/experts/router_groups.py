"""Routers that let a token use some groups of experts only (node-limited routing, DeepSeek-V3, 2.1.2), found by
dataflow: before its experts, such a router chooses among scores of groups.

    grouped = scores.view(T, 8, 32); best = grouped.topk(2)[0].sum(-1)
    allowed = best.topk(4)[1]  -->  ...  -->  expert = masked.topk(8)[1]         # 4 of 8 groups
"""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.ir.graph import arguments, global_shape, is_call, reach
from autopar.token_dispatchers import Routing

aten = torch.ops.aten
_PRODUCTS = (aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default, aten.bmm.default)


def router_groups(dispatch: Node) -> tuple[int, int]:
    """(groups of equally many consecutive experts, of how many a token may use some); (1, 1) without."""
    args = arguments(dispatch)
    experts = int(args["num_experts"])
    top = global_shape(args["expert"])[-1]
    router = reach([args["expert"]], lambda node: [] if is_call(node, *_PRODUCTS) else node.all_input_nodes)
    for node in router:
        if is_call(node, aten.topk.default):
            known = arguments(node)
            shape, limit = global_shape(known["self"]), int(known["k"])
            groups = shape[int(known["dim"])]
            flat = len(shape) == 2 and int(known["dim"]) % 2 == 1
            if flat and groups < experts and experts % groups == 0 and limit < groups:
                return (groups, limit) if top <= experts // groups * limit else (1, 1)
    return 1, 1


def groups_on_nodes(routing: Routing) -> str:
    """What a plan says of a router's groups; "" where there is one node, or no limit."""
    groups, nodes = routing.groups, routing.nodes
    if groups == 1 or nodes == 1:
        return ""
    said = f"a token uses {routing.limit} of {groups} groups of experts"
    if groups % nodes == 0:
        return (
            f"{said}, and {groups // nodes} are on each of {nodes} nodes: it reaches at most {routing.most_nodes} of "
            "them, which bytes and times are estimated with"
        )
    fits = max(n for n in range(1, min(groups, routing.ranks) + 1) if groups % n == 0 and routing.ranks % n == 0)
    return (
        f"warning: {said}, which do not fall on {nodes} nodes: it reaches up to {routing.most_nodes} of them; use a "
        f"number of nodes that divides {groups}, such as {fits} of {routing.ranks // fits} ranks"
    )

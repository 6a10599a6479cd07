"""sum_products: gradients that are products are added up within the product.

Consumes    a joint graph, and what of it depends on a tangent.
Guarantees  a product that is only added to an earlier sum, which nobody else takes, is one call with the sum. When the
            graph runs, that overwrites the sum (`autopar.ir.waits`): one copy of it is there, where the old sum, the
            product and the new sum would be.
Leaves      values of the forward: whether they are made again, and so who takes them, is up to a policy, and gradients
            have the same bits under each.

    g1 = mm(a, b); g2 = mm(c, d); g = add(g1, g2)    -->    g1 = mm(a, b); g = addmm(g1, c, d)

Weights are used several times where they are tied, and where losses are computed in chunks of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import insert_call, is_call

aten = torch.ops.aten


def sum_products(gm: GraphModule, tangents: Iterable[Node]) -> None:
    """See the module's docstring."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    gradients = set(tangents)
    for node in list(gm.graph.nodes):
        if gradients.isdisjoint(node.all_input_nodes) or node.op == "output":
            continue
        gradients.add(node)
        if not is_call(node, aten.add.Tensor) or node.kwargs or len(node.all_input_nodes) < 2:
            continue
        for x in [x for x in node.all_input_nodes if x in gradients]:
            _straighten(x)
        first, last = sorted(node.all_input_nodes, key=order.__getitem__)
        if is_call(last, aten.mm.default) and last in gradients and _only(first, node) and _only(last, node):
            total = insert_call(last, aten.addmm.default, (first, *last.args), like=last, val=last.meta["val"])
            order[total] = order[last]
            gradients.add(total)
            node.replace_all_uses_with(total)
            gm.graph.erase_node(node)
            gm.graph.erase_node(last)
    gm.recompile()


def _straighten(x: Node) -> None:
    """A weight that is taken transposed has its gradient transposed twice."""
    once = x.args[0] if is_call(x, aten.t.default) else None
    if isinstance(once, Node) and is_call(once, aten.t.default) and len(x.users) == len(once.users) == 1:
        x.replace_all_uses_with(once.args[0])  # type: ignore[arg-type]
        x.graph.erase_node(x)
        x.graph.erase_node(once)


def _only(x: Node, user: Node) -> bool:
    """Whether x is added there alone, as it is."""
    given, made = x.meta["val"], user.meta["val"]
    return list(x.users) == [user] and given.shape == made.shape and given.dtype == made.dtype

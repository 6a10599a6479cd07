"""Operators that torch itself defines by others, and that nobody here knows, are replaced by those.

multiply(x, y)          -->    mul(x, y)
movedim(x, 0, 2)        -->    permute(x, [1, 2, 0])
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from autopar.adapters.operators import decomposition_of, is_composite
from autopar.ir.graph import fake_mode, insert_call, output_node, placeholders
from autopar.ops.random_recipes import recipe_for
from autopar.rules import has_rule


def take_apart(gm: GraphModule, known: Container[Any]) -> None:
    """Replace composite operators without a rule and without a rewrite (``known``), if all of their parts have one:
    else messages, and ``replicate_ops``, name what the model calls."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and not _is_known(node, known) and is_composite(node.target):
            parts, operands = decomposition_of(node, fake_mode(gm.graph))
            calls = [part for part in parts.graph.nodes if part.op not in ("placeholder", "output")]
            if all(_is_known(part, known) for part in calls):
                _inline(node, parts, operands)


def _is_known(node: Node, known: Container[Any]) -> bool:
    recipe, writes = recipe_for(node.target)  # of a random operator
    return has_rule(node) or node.target in known or (recipe is not None and not writes)


def _inline(node: Node, parts: GraphModule, operands: list[Node]) -> None:
    """The parts in place of the call. Their values are known: of a recurrence there are thousands."""
    made: dict[Node, Any] = dict(zip(placeholders(parts), operands, strict=True))
    for part in parts.graph.nodes:
        if part.op == "call_function":
            args, kwargs = map_arg((part.args, part.kwargs), made.__getitem__)
            made[part] = insert_call(node, part.target, args, kwargs, val=part.meta["val"])
    results: Any = map_arg(output_node(parts).args[0], made.__getitem__)
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)

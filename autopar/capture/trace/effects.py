"""Effect tokens in a traced graph: how AOTAutograd keeps an operator that has no result from being dropped.

    inv_ex = linalg_inv_ex(a); inverse = inv_ex[0]; info = inv_ex[1]
    with_effects = with_effects(token, _linalg_check_errors, info, "linalg.inv", is_matrix=False)
    return with_effects[0], inverse        -->        return checked(inverse, info, "linalg.inv", False)

Tokens are extra inputs and outputs of a graph, which only AOTAutograd's own runtime supports.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._higher_order_ops.effects import with_effects
from torch.fx import GraphModule, Node

from autopar.capture.trace.export import line_of

CHECK = torch.ops.aten._linalg_check_errors.default


def without_tokens(gm: GraphModule, checked: Any) -> GraphModule:
    """Remove tokens from a graph and replace checks by the operator ``checked``, which returns the checked value.
    Raises ValueError for an operator with another effect."""
    calls = [n for n in gm.graph.nodes if n.target is with_effects]
    if not calls:
        return gm
    for call in calls:
        _replace_check(call, checked)
    tokens: set[Any] = {t for call in calls for t in (call.args[0], *call.users)}
    out = gm.graph.output_node()
    results: Any = out.args[0]
    out.args = (tuple(value for value in results if value not in tokens),)
    for node in sorted(tokens | set(calls), reverse=True):
        gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()
    return gm


def _replace_check(call: Node, checked: Any) -> None:
    """Make users of a factorization use the result of its check."""
    _, target, *rest = call.args
    if target is not CHECK:
        raise ValueError(
            f"capture: {line_of(call)}: {target} has a side effect, which a compiled step cannot keep in order; move "
            "it out of the forward"
        )
    info, name = rest
    assert isinstance(info, Node) and isinstance(info.args[0], Node), f"aot: a check of {info}"
    for value in [user for user in info.args[0].users if user is not info]:
        with call.graph.inserting_after(max(value, info)):
            made = call.graph.call_function(checked, (value, info, name, call.kwargs.get("is_matrix", False)))
        made.meta = dict(value.meta)
        others = [user for user in value.users if user is not made]
        for user in others:
            user.replace_input_with(value, made)

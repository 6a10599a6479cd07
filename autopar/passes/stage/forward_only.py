"""forward_only: the graph of a forward that nobody differentiates, in operators that run.

Consumes    a local graph.
Guarantees  conversions and the functions that compute one rank's part (`embedding_of_piece`, `dispatch_tokens`) are
            written out as the operators and raw collectives that they run.
Leaves      every other operator as it is: linears and norms stay whole, which is faster than their decompositions.

    y_r = exchange(y, "tp", 2, "P", "I")    -->    y_r = all_reduce(y, "tp", "sum")
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from autopar.adapters.fx.graph_nodes import new_node
from autopar.adapters.operators import OpOverload, name_of
from autopar.capture.trace.op_decomposition import TensorMeta, Value, fake_of
from autopar.ir.graph import fake_mode, is_call, remove_dead_code
from autopar.ir.meta import TRACE, TYPES, inherit
from autopar.passes.autodiff.vjp import derivative, marked


def forward_only(gm: GraphModule) -> GraphModule:
    """Write out the functions of a local graph, in place."""
    mode = fake_mode(gm.graph)
    for node in list(gm.graph.nodes):
        if (
            node.op == "call_function"
            and not isinstance(node.target, OpOverload)
            and node.target is not operator.getitem
        ):
            _write_out(node, mode)
    remove_dead_code(gm)  # results that nobody uses
    gm.recompile()
    return gm


def _write_out(node: Node, mode: Any) -> None:
    args, kwargs, operands = marked(node)
    likes = [TensorMeta.of(x.meta["val"]) for x in operands]
    found = derivative(node.target, args, kwargs, likes, [False for _ in operands])  # type: ignore[arg-type]
    values = dict(enumerate(operands))
    for call in found.calls:
        given = map_aggregate((call.args, call.kwargs), lambda x: values[x.number] if isinstance(x, Value) else x)
        name = name_of(call.target).rpartition(":")[2] if isinstance(call.target, OpOverload) else ""
        with node.graph.inserting_before(node):
            made = new_node(node.graph, "call_function", call.target, *given, name)
        inherit(made, node, TRACE)
        made.meta["val"], made.meta["original_aten"] = fake_of(found.likes[call.number], mode), call.original
        made.meta["has_gradient"] = False
        values[call.number] = made
    results = [None if v is None else values[v.number] for v in found.results]
    if not found.several:
        assert results[0] is not None
        inherit(results[0], node, TYPES) if results[0] not in operands else None
        node.replace_all_uses_with(results[0])
    for user in list(node.users):
        assert is_call(user, operator.getitem), f"forward_only: {user.name} uses all results of {node.name}"
        result = results[user.args[1]]  # type: ignore[index]
        assert result is not None
        user.replace_all_uses_with(result)
        node.graph.erase_node(user)
    node.graph.erase_node(node)

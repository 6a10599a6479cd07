"""From torch's training graph to the flat functional one, node by node where that is enough.

    torch.export  --`ExportedProgram.run_decompositions`-->  flat graph        traces the whole graph once more
                  --`decompose`-->                           the same graph    traces what is taken apart, alone

`run_decompositions` makes in-place operators functional, inlines grad-mode regions, takes apart composite operators
whose result may share storage with an operand (reshape, to, chunk, contiguous), and leaves the others as they are
(linear, layer_norm, sdpa). All of it looks at one node at a time, as long as what is written to has no views; else,
and where `decompose` meets anything unknown, the graph takes the long way.

    q = mm(x, w); q.div_(z); y = reshape(q, [4, 8])   -->   q = mm(x, w); div = div(q, z); y = view(div, [4, 8])
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _is_cia_op, _is_preservable_cia_op
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autopar.adapters.operators import mutates, returns_alias

_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled


class _NotKnown(Exception):
    """What takes the long way."""


def decompose(program: ExportedProgram, table: Mapping[Any, Callable[..., Any]]) -> ExportedProgram:
    """`run_decompositions` with ``table``; may change ``program`` and return it."""
    graph = Graph()
    try:
        graph.output(_copied(program.graph_module, graph, {}, table))
    except _NotKnown:
        flat: ExportedProgram = program.run_decompositions(dict(table))
        return flat
    _keep_metas(graph.output_node(), program.graph_module.graph.output_node())
    graph.eliminate_dead_code()
    program.graph_module.graph = graph
    return program


def _copied(gm: GraphModule, graph: Graph, known: dict[Node, Any], table: Mapping[Any, Any]) -> Any:
    """Copies a graph to the end of another, and returns what it returns. ``known``: nodes that have been copied."""
    for node in gm.graph.nodes:
        if node in known or node.op == "get_attr":
            continue
        if node.op == "output":
            return pytree.tree_map_only(Node, known.__getitem__, node.args[0])
        if node.op == "placeholder":
            known[node] = graph.node_copy(node, known.__getitem__)
            known[node].name = node.name  # the signature knows it by this one, a word of Python's (input) or not
        elif node.target is _REGION:
            known[node] = _inlined(node, gm, graph, known, table)
        elif node.target is operator.getitem and isinstance(known[node.args[0]], (tuple, list)):
            known[node] = known[node.args[0]][node.args[1]]
        else:
            known[node] = _call(node, graph, known, table)
            if mutates(node.target):
                known[node.args[0]] = known[node]
    raise AssertionError("a graph returns")


def _call(node: Node, graph: Graph, known: Mapping[Node, Any], table: Mapping[Any, Any]) -> Any:
    """What becomes of an operator."""
    if node.target is operator.getitem:
        return graph.node_copy(node, known.__getitem__)
    if not isinstance(node.target, OpOverload) or node.target in table:
        raise _NotKnown
    if node.target in _LIFTS:
        return _traced(torch.ops.aten.clone.default, node, graph, known)
    if node.target is torch.ops.aten.detach_.default and node.all_input_nodes[0].target in _LIFTS:
        return known[node.all_input_nodes[0]]
    if mutates(node.target):
        return _functional(node, graph, known)
    if _is_cia_op(node.target) and not _is_preservable_cia_op(node.target):
        return _traced(node.target, node, graph, known)
    return graph.node_copy(node, known.__getitem__)


def _functional(node: Node, graph: Graph, known: Mapping[Node, Any]) -> Any:
    """div_(x, y) --> div(x, y), if this graph made x and nothing is a view of it: who takes x from here on, takes the
    result."""
    target, written = node.target, node.args[0] if node.args else None
    assert isinstance(target, OpOverload)
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    if packet is None or target._overloadname not in packet.overloads() or not isinstance(written, Node):
        raise _NotKnown
    others = [written, *(user for user in written.users if user is not node)]
    if written.op != "call_function" or any(map(_may_alias, others)):
        raise _NotKnown
    return _traced(getattr(packet, target._overloadname), node, graph, known)


def _may_alias(node: Node) -> bool:
    """Whether the result of a node may be a view of an operand."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return _may_alias(node.args[0])
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"
    return _is_cia_op(node.target) or returns_alias(node.target)


def _inlined(node: Node, gm: GraphModule, graph: Graph, known: Mapping[Node, Any], table: Mapping[Any, Any]) -> Any:
    """no_grad(f, x) --> f(x): what needs no gradient has been detached before."""
    _, function, *operands = node.args
    assert isinstance(function, Node)
    body = getattr(gm, str(function.target))
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    given = {x: known[y] for x, y in zip(inputs, operands, strict=True)}  # type: ignore[index]
    return _copied(body, graph, given, table)


def _traced(target: OpOverload, node: Node, graph: Graph, known: Mapping[Node, Any]) -> Any:
    """What an operator calls, for the operands of ``node``; its result, or what it returns of its operands."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Node)]
    operands = [known[leaves[i]] for i in places]

    def call(*values: Any) -> Any:
        filled = list(leaves)
        for i, value in zip(places, values, strict=True):
            filled[i] = value
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return target(*args, **kwargs)

    with enable_python_dispatcher():  # some are taken apart in Python
        body = make_fx(call)(*(x.meta["val"] for x in operands))
    copies = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"), operands, strict=True))
    for inner in body.graph.nodes:
        if inner.op in ("placeholder", "output"):
            continue
        if inner.op != "call_function" or mutates(inner.target):
            raise _NotKnown
        copies[inner] = graph.node_copy(inner, copies.__getitem__)
        _keep_metas(copies[inner], node)
    result = pytree.tree_map_only(Node, copies.__getitem__, body.graph.output_node().args[0])
    if isinstance(result, Node) and _facts(result.meta["val"]) != _facts(node.meta["val"]):
        raise _NotKnown  # what is written to keeps its dtype
    return result


def _facts(value: Any) -> Any:
    return (value.dtype, value.shape, value.stride()) if isinstance(value, Tensor) else None


def _keep_metas(new: Node, old: Node) -> None:
    """Where the model made it; the value stays its own."""
    new.meta = {**old.meta, **({"val": new.meta["val"]} if "val" in new.meta else {})}


_LIFTS = (torch.ops.aten.lift_fresh_copy.default,)

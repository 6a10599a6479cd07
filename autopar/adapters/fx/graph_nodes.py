"""`torch.fx.Graph.create_node` and `node_copy` without torch's search of all arguments for symbolic numbers, which step
graphs do not have. That search takes a tenth of the time to compile a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.fx.graph import _illegal_names, _Namespace
from torch.fx.immutable_collections import immutable_dict
from torch.fx.node import map_arg


def new_node(
    graph: Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    name: str = "",
    annotation: Any = None,
) -> Node:
    """Create a node at the insertion point, with this name (default: from its target) made unique."""
    names = graph._graph_namespace
    name = _free_name(names, name) if name else names.create_name(graph._target_to_str(target), None)
    node = Node(graph, name, op, target, args, dict(kwargs) if kwargs else immutable_dict(), annotation)
    names.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def _free_name(names: _Namespace, wanted: str) -> str:
    """`create_name` for the name of a node of another graph, at half the cost."""
    if wanted in names._used_names or wanted in _illegal_names or not (wanted.isascii() and wanted.isidentifier()):
        return names.create_name(wanted, None)
    base, _, number = wanted.rpartition("_")
    if base and number.isdecimal():
        names._base_count[base] = int(number)
    else:
        names._base_count.setdefault(wanted, 0)
    names._used_names.add(wanted)
    return wanted


def copied_node(graph: Graph, node: Node, new: Callable[[Node], Any]) -> Node:
    """Copy a node of another graph; ``new`` maps its operands."""
    args, kwargs = map_arg((node.args, node.kwargs), new)
    made = new_node(graph, node.op, node.target, args, kwargs, node.name, node.type)
    made.meta.update(**node.meta)  # setting the attribute would remove the node from the graph's table and add it again
    return made


def node_of(x: Tensor, tracer: Any) -> Node | None:
    """The node of a tensor; None for one that is not in the graph, or a known number."""
    slot = get_proxy_slot(x, tracer, None)
    return slot.proxy.node if slot is not None and slot.constant is None else None

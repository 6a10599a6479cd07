"""Nodes as `torch.fx.Graph.create_node` and `node_copy` make them, without torch's look through all arguments for
symbolic numbers, which steps do not have: a tenth of the time to compile a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Graph, Node
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
    """A node at the insertion point, of this name (default: its target's) or one like it that no other node has."""
    names = graph._graph_namespace
    name = names.create_name(name or graph._target_to_str(target), None)
    node = Node(graph, name, op, target, args, dict(kwargs) if kwargs else immutable_dict(), annotation)
    names.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def copied_node(graph: Graph, node: Node, new: Callable[[Node], Any]) -> Node:
    """The copy of a node of another graph; ``new`` gives what stands for its operands here."""
    args, kwargs = map_arg((node.args, node.kwargs), new)
    made = new_node(graph, node.op, node.target, args, kwargs, node.name, node.type)
    made.meta = dict(node.meta)
    return made

"""Whether a captured model with fewer layers does in these layers, and around them, what the model with all does.

A model's code may read the numbers of its layers (`config.layer_types[i]`): without the layers before it, one may be
called with another's mask. So the calls of each layer have to be the same, and so do the values from outside of layers
that it reads, by the expressions that make them. What it reads of another layer may come from outside: a first layer
reads the embedding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node
from torch.fx.node import Argument, map_arg

from autopar.ir.graph import layer_of, values

_LAYER = "a layer"


@dataclass
class _Calls:
    """Calls of one layer. read: values from elsewhere, as (their source, their types)."""

    made: Counter[str] = field(default_factory=Counter)
    read: Counter[tuple[Hashable, str]] = field(default_factory=Counter)


def is_part(few: GraphModule, whole: GraphModule) -> bool:
    """Whether a graph with fewer layers is a part of one with more."""
    found, calls = _calls(few), _calls(whole)
    return all(layer in calls and _equal(one, calls[layer]) for layer, one in found.items())


def _equal(one: _Calls, other: _Calls) -> bool:
    only, others = one.read - other.read, other.read - one.read
    from_layers = {source for source, _ in others} <= {_LAYER}
    return one.made == other.made and from_layers and _types(only) == _types(others)


def _types(read: Counter[tuple[Hashable, str]]) -> Counter[str]:
    found = Counter[str]()
    for (_, types), count in read.items():
        found[types] += count
    return found


def _calls(gm: GraphModule) -> dict[str, _Calls]:
    """The calls of each layer; outside of layers under ""."""
    found: dict[str, _Calls] = {"": _Calls()}
    sources: dict[Node, Hashable] = {}
    for node in gm.graph.nodes:
        layer = layer_of(node) if node.op == "call_function" else ""
        sources[node] = _LAYER if layer else _expression(node, sources)
        if node.op != "call_function":
            continue
        calls = found.setdefault(layer, _Calls())
        calls.made[f"{node.target} {_literals(node)} {_type(node)}"] += 1
        if layer:
            read = [x for x in node.all_input_nodes if x.op == "call_function" and layer_of(x) != layer]
            calls.read.update((sources[x], _type(x)) for x in read)
    return found


def _expression(node: Node, sources: dict[Node, Hashable]) -> Hashable:
    """Equal for values outside of layers that are made alike."""
    inputs = tuple(sources[x] for x in node.all_input_nodes)
    return hash((node.op, node.name if node.op == "placeholder" else str(node.target), _literals(node), inputs))


def _literals(node: Node) -> str:
    """The arguments that are no values."""

    def hidden(_: Node) -> Argument:
        return None

    return f"{map_arg(node.args, hidden)} {map_arg(node.kwargs, hidden)}"


def _type(node: Node) -> str:
    return str([(tuple(value.shape), value.dtype) for value in values(node)])

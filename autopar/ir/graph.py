"""Reading and editing graphs: named arguments, shapes, module paths, and the few edits that passes make."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import operator
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from autopar.adapters.fx.graph_nodes import copied_node, new_node
from autopar.adapters.fx.lazy import graph_module
from autopar.adapters.operators import OpOverload, argument_defaults
from autopar.capture.trace.export import line_of
from autopar.ir.mesh import Mesh
from autopar.ir.meta import ORIGIN, inherit
from autopar.ir.placement import INVARIANT, Pieces, Placement, nested_shape
from autopar.ops.traits import STOPS_GRADIENT


def is_call(node: Node, *targets: Any) -> bool:
    """Whether the node calls one of the targets."""
    return node.op == "call_function" and node.target in targets


def calls_of(graph: Graph, *targets: Any) -> list[Node]:
    """The nodes that call one of the targets, in order, without a scan of the graph."""
    return sorted(n for t in targets for n in graph.find_nodes(op="call_function", target=t, sort=False))


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by the names of its operator's schema, defaults filled in."""
    target = node.target
    if not isinstance(target, OpOverload):
        names = _parameter_names(target) if callable(target) else ()
        return {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    out = dict(argument_defaults(target))
    out.update(zip(out, node.args, strict=False))
    out.update(node.kwargs)
    return out


@functools.cache
def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except ValueError:  # a builtin such as getitem
        return ("a", "b")


def set_argument(node: Node, name: str, value: Any) -> None:
    """Replace one argument by its schema name."""
    known = isinstance(node.target, OpOverload)
    names = list(argument_defaults(node.target) if known else _parameter_names(node.target))
    position = names.index(name)
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


def tensor_operands(node: Node) -> list[Node]:
    """Operand nodes in the order of the arguments, lists flattened, repeats kept."""
    found: list[Node] = []
    _collect(node.args, found)
    if node.kwargs:
        _collect(node.kwargs.values(), found)
    return found


def _collect(items: Iterable[Any], found: list[Node]) -> None:
    for value in items:
        if isinstance(value, Node):
            found.append(value)
        elif isinstance(value, (list, tuple, dict)):
            _collect(value.values() if isinstance(value, dict) else value, found)


def frozen(value: Any, leaf: Callable[[Any], Hashable]) -> Hashable:
    """Nested arguments as a hashable key: ``leaf`` maps everything that is not a list, tuple or dict."""
    if isinstance(value, (list, tuple)):
        return tuple([frozen(x, leaf) for x in value])
    if isinstance(value, dict):
        return tuple([(name, frozen(x, leaf)) for name, x in value.items()])
    return leaf(value)


def values(node: Node) -> tuple[torch.Tensor, ...]:
    """The (fake) tensors that a node returns: one, or several for a multi-output op."""
    val = node.meta["val"]
    if isinstance(val, torch.Tensor):
        return (val,)
    return tuple(v for v in val if isinstance(v, torch.Tensor)) if isinstance(val, (tuple, list)) else ()


def shape(node: Node) -> tuple[int, ...]:
    """Shape of a single-tensor value."""
    return tuple(node.meta["val"].shape)


def nbytes(node: Node) -> int:
    """Bytes of all tensors that a node returns."""
    return sum(math.prod(v.shape) * v.dtype.itemsize for v in values(node))


def placement(node: Node, axis: str) -> Placement:
    """Placement of a value on an axis (Invariant if it has none)."""
    found: Placement = node.meta.get("placements", {}).get(axis, INVARIANT)
    return found


def set_placement(node: Node, axis: str, value: Placement) -> None:
    """Record a placement; the dict is copied so that nodes never share one."""
    node.meta["placements"] = {**node.meta.get("placements", {}), axis: value}


def global_shape(node: Node) -> tuple[int, ...]:
    """Global shape of a value, at any level."""
    found = node.meta.get("global_shape")
    return tuple(found) if found is not None else shape(node)


def shape_on(node: Node, axis: str, mesh: Mesh) -> tuple[int, ...]:
    """Shape as ``axis`` sees it: sharded by the axes before it in the order of sharding, not yet by itself."""
    earlier: dict[str, Pieces] = {}
    for name, size in mesh.cut_order.items():
        if name == axis:
            break
        earlier[name] = size
    return nested_shape(global_shape(node), node.meta.get("placements", {}), earlier)


def has_gradient(node: Node) -> bool:
    """Whether a gradient flows into the value; set once by `mark_gradients`."""
    return bool(node.meta.get("has_gradient", False))


def mark_gradients(gm: GraphModule, trainable: Iterable[str]) -> None:
    """meta['has_gradient']: a floating value that depends on a trainable parameter, not through a detach."""
    names = set(trainable)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            node.meta["has_gradient"] = node.name in names
        elif node.op == "call_function":
            node.meta["has_gradient"] = passes_gradient(node)


def passes_gradient(node: Node) -> bool:
    """Whether a gradient flows into the result of a call, as marked at its operands."""
    from_operand = any(has_gradient(x) for x in tensor_operands(node)) and node.target not in STOPS_GRADIENT
    return from_operand and any(v.dtype.is_floating_point or v.dtype.is_complex for v in values(node))


def module_path(node: Node) -> str:
    """Where in the model a node comes from, for messages and dumps."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    return str(list(stack.values())[-1][0])


def layer_of(node: Node) -> str:
    """The repeated block a node belongs to: its module path up to the first index, '' outside of any."""
    parts = module_path(node).split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ""


def describe(node: Node) -> str:
    """'aten.linear.default (linear_3) in model.layers.0.mlp' for messages."""
    path = module_path(node)
    target = node.op if node.op != "call_function" else getattr(node.target, "__name__", str(node.target))
    if isinstance(node.target, OpOverload):
        target = str(node.target)
    return f"{target} ({node.name})" + (f" in {path}" if path else "")


def described_at(node: Node) -> str:
    """`describe`, with the line of the model that the node comes from, where known."""
    return f"{describe(node)} at {line_of(node)}" if node.meta.get("stack_trace") else describe(node)


def insert_call(
    before: Node,
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: Node | None = None,
    val: Any = None,
    name: str = "",
) -> Node:
    """A new call before a node, with the origin of ``like`` (default: ``before``). ``val``: its fake value, if it is
    known without running the call."""
    graph, kwargs = before.graph, dict(kwargs or {})
    with graph.inserting_before(before):
        node = new_node(graph, "call_function", target, tuple(args), kwargs, name)
    inherit(node, like or before, ORIGIN)
    node.meta["val"] = run_fake(graph, target, args, kwargs) if val is None else val
    node.meta["has_gradient"] = passes_gradient(node)
    return node


def run_fake(graph: Graph, target: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
    """The result of a call on the fake values of its operands."""
    operands: list[Node] = []
    _collect((args, kwargs), operands)
    values, named = map_arg((args, kwargs or {}), lambda n: n.meta["val"])
    with torch.no_grad(), fake_mode(graph, operands):
        return target(*values, **named)


def replace_operand(user: Node, old: Node, new: Node) -> None:
    """Use ``new`` instead of ``old`` in one user."""
    user.replace_input_with(old, new)


def replace_operands(user: Node, operands: Sequence[Node]) -> None:
    """Set other `tensor_operands`, in their order. A value that is passed twice may get two replacements."""
    if list(operands) != tensor_operands(user):
        others = iter(operands)
        user.args = map_arg(user.args, lambda _: next(others))
        user.kwargs = map_arg(user.kwargs, lambda _: next(others))


def add_placeholder(graph: Graph, name: str, after: Node | None = None, like: Node | None = None) -> Node:
    """A new input after another one or at the insertion point, for values like ``like``. Its argument has the name of
    the node: unique in the graph."""
    if after is None:
        node = graph.placeholder(name)
    else:
        with graph.inserting_after(after):
            node = graph.placeholder(name)
    node.target = node.name
    if like is not None:
        node.meta.update(**like.meta)
    return node


def placeholders(gm: GraphModule) -> list[Node]:
    """The inputs of a graph, in order."""
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def fake_mode(graph: Graph, nodes: Iterable[Node] = ()) -> Any:
    """The fake mode of the values of ``nodes``, or else of the graph's inputs; factories must run under it. None where
    values are real."""
    inputs = (n for n in graph.nodes if n.op == "placeholder")
    found = (v.fake_mode for n in itertools.chain(nodes, inputs) for v in values(n) if hasattr(v, "fake_mode"))
    return next(found, contextlib.nullcontext())


def set_device(gm: GraphModule, device: torch.device) -> None:
    """Make factories (arange, zeros, casts) create their values on a device; graphs are captured on the CPU."""
    for node in gm.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.update_kwarg("device", device)
    gm.recompile()


def reach(
    nodes: Iterable[Node], onward: Callable[[Node], Iterable[Node]] = lambda node: node.all_input_nodes
) -> Iterator[Node]:
    """The nodes and everything that ``onward`` (default: to operands) reaches from them, each once, as visited."""
    seen: set[Node] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node not in seen:
            seen.add(node)
            yield node
            queue += onward(node)


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """The nodes and everything that they depend on."""
    return set(reach(nodes))


def loss_places(gm: GraphModule) -> list[int]:
    """The outputs of a graph with a signature that are losses: the scalars with a gradient, or only the one called
    "loss", as transformers' models return next to its terms."""
    specs = gm.meta["signature"].outputs
    found = [
        i
        for i, (spec, x) in enumerate(zip(specs, outputs(gm), strict=True))
        if spec.kind == "output" and isinstance(x, Node) and has_gradient(x) and not x.meta["val"].dim()
    ]
    return [i for i in found if specs[i].name == "loss"] or found


def output_node(gm: GraphModule) -> Node:
    """The output node."""
    return next(iter(reversed(gm.graph.nodes)))


def outputs(gm: GraphModule) -> list[Any]:
    """What the graph returns, flat."""
    result = output_node(gm).args[0]
    return list(result) if isinstance(result, (list, tuple)) else [result]


def extracted(gm: GraphModule, values: Collection[Node], title: str) -> GraphModule:
    """The subgraph that computes some values, with these as results."""
    needed, graph, copies = ancestors(values), Graph(), dict[Node, Node]()
    for node in gm.graph.nodes:
        if node in needed:
            copies[node] = copied_node(graph, node, copies.__getitem__)
    graph.output(tuple(copies[x] for x in values))
    return graph_module(graph, title)


def copy_graph(gm: GraphModule) -> GraphModule:
    """A copy whose nodes and metadata can be changed without changing the original's."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        new = copies[node] = copied_node(graph, node, copies.__getitem__)
        if node.op == "placeholder":
            new.name = node.name  # the signature has this name, even if it is a Python builtin (input)
    gm_copy = graph_module(graph, root=gm)
    gm_copy.meta = dict(gm.meta)
    return gm_copy


def copy_node(graph: Graph, node: Node, copies: dict[Node, Node]) -> Node:
    """The copy of a node in another graph; operands that ``copies`` lacks are copied right before it."""
    if node not in copies:
        for x in node.all_input_nodes:
            copy_node(graph, x, copies)
        copies[node] = copied_node(graph, node, copies.__getitem__)
    return copies[node]


def remove_dead_code(gm: GraphModule) -> None:
    """Drop calls without users. Parameters' placeholders stay: the signature names them."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op == "call_function" and not node.users:
            gm.graph.erase_node(node)


def getitem_index(node: Node) -> int | None:
    """i when the node is ``operand[i]``."""
    return int(node.args[1]) if is_call(node, operator.getitem) else None  # type: ignore[arg-type]


def without_indices(name: str) -> str:
    """model.layers.3.mlp -> model.layers.*.mlp"""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def without_numbers(reason: str) -> str:
    """A reason without what differs between layers: the numbers at the end of node names and in paths."""
    return re.sub(r"(?<=[_.])\d+\b", "*", reason)


def compressed(names: Sequence[str]) -> str:
    """['a.0.w', 'a.1.w', 'a.2.w'] -> 'a.{0..2}.w'. All names have the same parts but for their indices."""
    columns = list(zip(*(name.split(".") for name in names), strict=True))
    shown, combinations = [], 1
    for column in columns:
        distinct = list(dict.fromkeys(column))
        combinations *= len(distinct)
        shown.append(distinct[0] if len(distinct) == 1 else f"{{{_ranges(sorted(map(int, distinct)))}}}")
    text = ".".join(shown)
    return text if combinations == len(names) else f"{text} ({len(names)} of {combinations})"


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0..2,5'"""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}..{r[-1]}" if len(r) > 2 else f"{r[0]},{r[1]}" for r in runs)


def modules_of(parameters: Iterable[str]) -> str:
    """The layers that parameters belong to: 'model.embed_tokens, model.layers.{0..3}'.

    A layer is the path up to the first index, or the module of a parameter outside of repeated blocks.
    """
    groups: dict[str, dict[str, None]] = {}
    for name in parameters:
        path = name.split(".")
        index = next((i + 1 for i, part in enumerate(path) if part.isdigit()), len(path) - 1)
        layer = ".".join(path[:index]) or name
        groups.setdefault(without_indices(layer), {})[layer] = None
    return ", ".join(compressed(list(layers)) for layers in groups.values())

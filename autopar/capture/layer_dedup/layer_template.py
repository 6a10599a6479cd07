"""Templates: the nodes that the forward of one layer added to a graph, to be copied for identical layers.

    mul(x0) -> linear(p_layers_0_q) -> ...  -> add_9      template: x0 and p_layers_0_q are given, add_9 is returned
    mul(x1) -> linear(p_layers_1_q) -> ...  -> add_19     its copy

Templates are taken from the tracer's graph during the export, where operators may still write in place; so do copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node, Proxy
from torch.fx.experimental.proxy_tensor import _ProxyTensor, fast_detach, set_proxy_slot
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autopar.adapters.ac_regions import new_regions, next_region
from autopar.adapters.copying.fake import memory_of
from autopar.adapters.fx.graph_nodes import copied_node, node_of
from autopar.adapters.grad_fn_paths import UNKNOWN, GradFnPaths, continues_at, lose_paths, start_of

_PLAIN = (bool, int, float, str, type(None))


class _Output(NamedTuple):
    """An output leaf of a layer: an argument (``given``: its index), the result of a node, or a plain value. behind:
    indices of the arguments that the backward of a result reaches; None: unknown."""

    given: int | None = None
    node: Node | None = None
    value: Any = None
    behind: tuple[int, ...] | None = None


@dataclass
class Template:
    """Nodes of a layer. given: node of an argument -> its index. rebound: (index, new node) of arguments that the layer
    writes to. followed: whether ``behind`` of outputs is known. depth: number of modules around its nodes. since: the
    first activation checkpoint region that may have begun within. copies: how often it was copied."""

    path: str
    depth: int
    nodes: list[Node]
    given: dict[Node, int]
    rebound: list[tuple[int, Node]]
    followed: bool
    outputs: list[_Output]
    spec: Any
    since: int
    copies: int = 0

    def leaks(self) -> bool:
        """Whether a node outside uses a value that the forward did not return, which copies do not provide."""
        inner = set(self.nodes)
        returned = {out.node for out in self.outputs} | {node for _, node in self.rebound}
        return any(user not in inner for node in inner - returned for user in node.users)

    def text(self) -> Any:
        """A description that is equal for templates with the same computation."""
        number: dict[Node, Any] = {node: ("given", i) for node, i in self.given.items()}
        number |= {node: i for i, node in enumerate(self.nodes)}
        calls = [
            (n.target, pytree.tree_map_only(Node, number.__getitem__, (n.args, n.kwargs)), _metadata(n.meta.get("val")))
            for n in self.nodes
        ]
        outputs = [(o.given, number[o.node] if o.node else None, None if o.node else o.value) for o in self.outputs]
        return calls, outputs, self.spec, [(i, number[node]) for i, node in self.rebound]

    def copy(self, tracer: Any, given: Sequence[Tensor]) -> Any:
        """Copy the nodes for other arguments; returns the result of the layer."""
        self.copies += 1
        new: dict[Node, Node] = {node: _known(given[i], tracer) for node, i in self.given.items()}
        around = {key: (path, _class_name(cls)) for key, (path, cls) in tracer.module_stack.items()}
        regions = new_regions()
        for node in self.nodes:
            new[node] = made = copied_node(tracer.graph, node, new.__getitem__)
            made.meta = {**node.meta, "nn_module_stack": around | self._below(node, path_of_call(tracer))}
            if "val" in node.meta:
                made.meta["val"] = _detached(node.meta["val"])
            if (number := made.meta.pop("ac_region", 0)) >= self.since:
                made.meta["ac_region"] = regions[number]
        for i, node in self.rebound:
            set_node(given[i], new[node], tracer)
        if not self.followed:
            lose_paths()
        made_of: dict[Node, Tensor] = {}
        for out in self.outputs:
            if out.node is not None and out.node not in made_of:
                made_of[out.node] = result_like(out.value)
                set_node(made_of[out.node], new[out.node], tracer)
                continues_at(made_of[out.node], None if out.behind is None else [given[i] for i in out.behind])
        leaves = [
            given[o.given] if o.given is not None else o.value if o.node is None else made_of[o.node]
            for o in self.outputs
        ]
        return pytree.tree_unflatten(leaves, self.spec)

    def _below(self, node: Node, path: str) -> dict[str, tuple[str, str]]:
        """The submodules around a node, renamed for a copy at another path."""
        entries = list(node.meta["nn_module_stack"].items())[self.depth :]
        return {_moved(key, self.path, path): (_moved(at, self.path, path), cls) for key, (at, cls) in entries}


def template_of_call(
    tracer: Any, given: Sequence[Tensor], call: Callable[[], Any]
) -> tuple[Any, Callable[[], Template | None]]:
    """(result of a forward, function that returns its template). The template is None if the forward cannot be copied:
    it used a tensor that is not in ``given``, or returned one that is not in the graph or shares memory."""
    before = [node_of(x, tracer) for x in given]
    starts = [start_of(x) for x in given]
    last, since = next(iter(reversed(tracer.graph.nodes))), next_region()
    made = call()
    return made, lambda: _template(tracer, given, before, _after(last, tracer.graph), made, since, starts)


def _template(
    tracer: Any,
    given: Sequence[Tensor],
    before: Sequence[Node | None],
    nodes: list[Node],
    made: Any,
    since: int,
    starts: Sequence[Any],
) -> Template | None:
    places = {node: i for i, node in enumerate(before) if node is not None}
    if len(places) < sum(node is not None for node in before) or not _is_closed(nodes, places):
        return None
    leaves, spec = pytree.tree_flatten(made)
    outputs = _outputs(leaves, given, set(nodes), tracer)
    now = [node_of(x, tracer) for x in given]
    rebound = [
        (i, new) for i, (old, new) in enumerate(zip(before, now, strict=True)) if new is not None and new is not old
    ]
    if outputs is None or any(node not in set(nodes) for _, node in rebound):
        return None
    followed = not any(given[i].requires_grad for i, _ in rebound)  # else the backward of aliases changes, too
    outputs = _with_paths(outputs, starts) if followed else outputs
    depth = len(tracer.module_stack)
    return Template(path_of_call(tracer), depth, nodes, places, rebound, followed, outputs, spec, since)


def _after(last: Node, graph: Graph) -> list[Node]:
    """The nodes after a node, in order."""
    found: list[Node] = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        found.append(node)
    return found[::-1]


def path_of_call(tracer: Any) -> str:
    """The path of the module that is being called."""
    return str(list(tracer.module_stack.values())[-1][0])


def _known(x: Tensor, tracer: Any) -> Node:
    node = node_of(x, tracer)
    assert node is not None, "equal signatures, so it has a node where the template had one"
    return node


def _is_closed(nodes: Sequence[Node], given: dict[Node, int]) -> bool:
    """Whether nodes use only each other and ``given``, and all are calls with static sizes."""
    inner = set(nodes)
    for node in nodes:
        if node.op != "call_function" or any(x not in inner and x not in given for x in node.all_input_nodes):
            return False
        for value in pytree.tree_leaves(node.meta.get("val")):
            if value is not None and not _has_known_sizes(value):
                return False
    return True


def _has_known_sizes(x: Any) -> bool:
    return isinstance(x, FakeTensor) and all(type(n) is int for n in (*x.shape, *x.stride()))


def _outputs(leaves: Sequence[Any], given: Sequence[Tensor], inner: set[Node], tracer: Any) -> list[_Output] | None:
    """Outputs of a forward; None if one shares memory with another one or with an argument, or is not in the graph."""
    found: dict[int, _Output] = {id(x): _Output(given=i) for i, x in enumerate(given)}
    storages = {memory_of(x) for x in given}
    outputs: list[_Output] = []
    for x in leaves:
        if type(x) in _PLAIN:
            outputs.append(_Output(value=x))
            continue
        if id(x) not in found:
            node = node_of(x, tracer) if isinstance(x, FakeTensor) else None
            if node is None or node not in inner or memory_of(x) in storages:
                return None
            if not is_non_overlapping_and_dense_or_false(x):
                return None
            storages.add(memory_of(x))
            found[id(x)] = _Output(node=node, value=x)
        outputs.append(found[id(x)])
    return outputs


def _with_paths(outputs: list[_Output], starts: Sequence[Any]) -> list[_Output]:
    """Outputs with ``behind`` set. ``starts``: autograd nodes of the arguments."""
    paths = GradFnPaths({node: 2 << i for i, node in enumerate(starts) if node is not None})

    def behind(x: Tensor) -> tuple[int, ...] | None:
        bits = paths.reached(x)
        return None if bits & UNKNOWN else tuple(i for i in range(len(starts)) if bits & 2 << i)

    return [out if out.node is None else out._replace(behind=behind(out.value)) for out in outputs]


def _metadata(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: (x.shape, x.stride(), x.dtype), value)


def _moved(path: str, old: str, new: str) -> str:
    return new + path[len(old) :] if path == old or path.startswith(old + ".") else path


def _class_name(cls: Any) -> str:
    """The name of a class, as in the meta of nodes."""
    return f"{cls.__module__}.{cls.__qualname__}" if isinstance(cls, type) else str(cls)


def set_node(x: Tensor, node: Node, tracer: Any) -> None:
    """Make a node the tracer's node of a tensor."""
    set_proxy_slot(x, tracer, _ProxyTensor(Proxy(node, tracer), None))


def _detached(value: Any) -> Any:
    """Separate objects with the same metadata, since each node needs its own."""
    if isinstance(value, FakeTensor):
        return fast_detach(value.fake_mode, value)
    return type(value)(map(_detached, value)) if isinstance(value, (list, tuple)) else value


def result_like(x: FakeTensor, requires_grad: bool | None = None) -> Tensor:
    """A tensor with the same metadata, made without recording an operator. ``requires_grad`` overrides that of x."""
    with _disable_current_modes(), x.fake_mode, torch.enable_grad():
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        made.requires_grad_(x.requires_grad if requires_grad is None else requires_grad)
        return made if x.is_leaf else made.clone()

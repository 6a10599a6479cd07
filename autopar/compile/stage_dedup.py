"""Pipeline stages that are equal except for names are compiled once: the others are copies with names of their own.

    stage 3: layers.24 ... layers.31        compiled
    stage 4: layers.32 ... layers.39        the same graphs; p_layers_24_q -> p_layers_32_q, grad:add_97 -> grad:add_129

The graphs of a copy are built on first access, by the ranks that run it.

The key of a stage is every node of its graph with all its metadata, and its inputs and outputs. Names are replaced by
positions, so what compiling does must not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.adapters.fx.graph_nodes import copied_node
from autopar.adapters.fx.lazy import graph_module
from autopar.adapters.keys import told_apart
from autopar.ir.graph import frozen
from autopar.ir.meta import NODES
from autopar.passes.stage.split_stages import StageGraph
from autopar.steps.graphs import CopiedStepGraph, Stage, StepGraph

_NOTED = NODES.keys() - {"nn_module_stack", "stack_trace", "original_aten", "ac_region"}


class KnownStages:
    """The stages of one pipeline."""

    def __init__(self) -> None:
        self._stages: dict[Hashable, tuple[list[Node], Stage]] = {}
        self._seen: dict[int, tuple[StageGraph, Hashable, list[Node]]] = {}

    def like(self, part: StageGraph) -> Hashable:
        """Equal for equal stages. Describes a stage as it is at the first call."""
        return self._known(part)[0]

    def stage(self, part: StageGraph, make: Callable[[], Stage], how: Hashable = ()) -> Stage:
        """The result of ``make`` for the stage, or a copy of that for an equal one made in the same way."""
        key, nodes = self._known(part)
        known = self._stages.get((key, how))
        if known is not None:
            return known[1] if known[0] is nodes else _copied(known[1], part, _Names(known[0], nodes))
        names = [node.name for node in nodes]
        stage = make()
        assert names == [node.name for node in nodes], "compiling a stage does not change its graph"
        self._stages[key, how] = nodes, stage
        return stage

    def _known(self, part: StageGraph) -> tuple[Hashable, list[Node]]:
        if id(part) not in self._seen:
            nodes = list(_nodes(part))
            try:
                key: Hashable = _key(part, nodes)
                hash(key)
            except TypeError:  # something unhashable
                key = id(part)
            self._seen[id(part)] = part, key, nodes
        _, key, nodes = self._seen[id(part)]
        return key, nodes


def _nodes(part: StageGraph) -> Iterator[Node]:
    """The nodes of the stage's graph, and those between stored and used parameters."""
    yield from part.graph.graph.nodes
    seen: set[Node] = set()
    for used, parameter in (part.used or {}).items():
        path = [used]
        for node in path:
            if node not in seen:
                seen.add(node)
                yield node
                path += [] if node is parameter else node.all_input_nodes


def _key(part: StageGraph, nodes: Sequence[Node]) -> Hashable:
    place = {node: i for i, node in enumerate(nodes)}
    named = {node.name: i for i, node in enumerate(part.graph.graph.nodes)}

    def leaf(x: Any) -> Hashable:
        if isinstance(x, Node):
            return Node, place[x]
        if isinstance(x, torch.Tensor):
            return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad
        return told_apart(x)

    regions: dict[Any, int] = {}
    calls = tuple(
        (
            node.op,
            regions.setdefault(node.meta.get("ac_region"), len(regions)),
            None if node.op == "placeholder" else node.target,
            frozen(node.args, leaf),
            frozen(node.kwargs, leaf),
            tuple(sorted((key, frozen(value, leaf)) for key, value in node.meta.items() if key in _NOTED)),
        )
        for node in nodes
    )
    results = tuple((named.get(_of(name), name), kind, name.count(":")) for name, kind in part.results.items())
    used = part.used and tuple((place[a], place[b]) for a, b in part.used.items())
    fixed = tuple(named.get(name, -1) for name in part.fixed)
    mutations = tuple(named.get(_of(name), name) for name in part.mutations)
    return calls, results, used, fixed, mutations, len(part.parameters)


def _of(name: str) -> str:
    return name.rpartition(":")[2]


class _Names:
    """From the names of one stage to those of an equal one."""

    def __init__(self, old: Sequence[Node], new: Sequence[Node]) -> None:
        self.of_nodes = {a.name: b.name for a, b in zip(old, new, strict=True)}
        self.taken = set(self.of_nodes.values())
        self.paths: dict[str, str] = {}
        for a, b in zip(old, new, strict=True):
            pairs = zip(a.meta.get("nn_module_stack", {}).items(), b.meta.get("nn_module_stack", {}).items())
            self.paths |= {
                x: y for (key, (path, _)), (other, (there, _)) in pairs for x, y in ((key, other), (path, there))
            }

    def node(self, name: str) -> str:
        """A node of the stage, or one that compiling created."""
        return self.of_nodes.get(name) or (f"{name}_made" if name in self.taken else name)

    def value(self, name: str) -> str:
        """A value of a step."""
        head, colon, tail = name.rpartition(":")
        return f"{head}{colon}{self.node(tail)}"

    def origin(self, stack: Mapping[str, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
        """The modules around a node."""
        return {self.paths.get(key, key): (self.paths.get(path, path), cls) for key, (path, cls) in stack.items()}


def _copied(stage: Stage, part: StageGraph, names: _Names) -> Stage:
    value = names.value
    made = replace(
        stage,
        aliases={value(a): value(b) for a, b in stage.aliases.items()},
        gathered={value(a): value(b) for a, b in stage.gathered.items()},
        losses=[value(x) for x in stage.losses],
        dependent=[value(x) for x in stage.dependent],
        roots={value(a): [value(x) for x in b] for a, b in stage.roots.items()},
        mutations=part.mutations,
        parameters=part.parameters,
    )
    for item in fields(Stage):
        step = getattr(stage, item.name)
        if isinstance(step, StepGraph):
            setattr(made, item.name, _step(step, names))
    return made


def _step(step: StepGraph, names: _Names) -> StepGraph:
    inputs, outputs = [names.value(x) for x in step.inputs], [x and names.value(x) for x in step.outputs]
    return CopiedStepGraph(step, partial(_renamed, step, names), inputs, outputs)


def _renamed(step: StepGraph, names: _Names) -> GraphModule:
    graph, new, given = Graph(), dict[Node, Node](), iter(step.inputs)
    for node in step.graph.graph.nodes:
        made = new[node] = copied_node(graph, node, new.__getitem__)
        made.name = names.node(node.name)
        if made.op == "placeholder":
            value = next(given)
            if node.name == value.replace(":", "_"):  # one that is named after the received value
                made.name = names.value(value).replace(":", "_")
            made.target = made.name
        if "nn_module_stack" in node.meta:
            made.meta["nn_module_stack"] = names.origin(node.meta["nn_module_stack"])
    gm: GraphModule = graph_module(graph)
    gm.meta = dict(step.graph.meta)
    return gm

"""Invariants of a step graph from its creation until it runs, under every pass: `promise`, `check_step`.

    backward = promise(stage.backward.graph)            records results and communication
    PassManager(STEP_PASSES).run(backward, ctx, facts=("step",))     checks them after every pass

Buckets change the number of collectives and scheduling their position, but neither the results nor how many elements
are reduced, gathered or exchanged over an axis.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.adapters.keys import told_apart
from autopar.ir.graph import (
    arguments,
    calls_of,
    describe,
    frozen,
    is_call,
    outputs,
    placeholders,
    placement,
    tensor_operands,
)
from autopar.ir.mesh import IN_TIME, Mesh
from autopar.ir.placement import Shard, dual
from autopar.ir.waits import PRODUCT_OF
from autopar.ops.traits import COLLECTIVES
from autopar.rewrite.compilation import Compilation
from autopar.rules.local_type_rules import held_results
from autopar.rules.local_types import UNKNOWN, LocalType, local_type_of, may_be, shown
from autopar.steps.graphs import Stage, StepGraph, earlier_sum, grad, is_a, of, output
from autopar.steps.of_rank import GRAPHS, graph_of

Result = tuple[tuple[int, ...], torch.dtype] | None  # shape and dtype of an output; None: no value
Moved = Counter[tuple[str, str, str, str]]  # (collective, axis, reduction, dtype) -> elements that go in


class StepError(Exception):
    """A step graph that does not do what it was built for: a wrong gradient. Always a mistake of a pass."""


@dataclass(frozen=True)
class Promise:
    """The results of a step graph, and what it moves between ranks."""

    results: tuple[Result, ...]
    moved: Moved


def promise(gm: GraphModule) -> GraphModule:
    """The graph, annotated with its present results and communication."""
    gm.meta["promise"] = Promise(_results(gm), _moved(gm))
    return gm


def _results(gm: GraphModule) -> tuple[Result, ...]:
    return tuple(_type(v) if isinstance(v, Node) else None for v in outputs(gm))


def _type(node: Node) -> Result:
    val = node.meta["val"]
    return (tuple(val.shape), val.dtype) if isinstance(val, torch.Tensor) else None


def _moved(gm: GraphModule) -> Moved:
    found: Moved = Counter()
    for node in calls_of(gm.graph, *COLLECTIVES):
        known = arguments(node)
        x = known["x"].meta["val"]
        for axis in known["axis"].split(","):  # a reduction over joined axes is one over each
            found[str(node.target), axis, known.get("op", ""), str(x.dtype)] += x.numel()
    return found


def check_step(gm: GraphModule, ctx: Compilation) -> None:
    """The graph is well-formed, returns no input, and its results and communication are as promised."""
    _check_order(gm)
    promised: Promise = gm.meta["promise"]
    found = _results(gm)
    for i, (have, expected) in enumerate(zip(found, promised.results, strict=True)):
        if have != expected:
            raise StepError(f"output {i} of a step is {_shown(have)}, it was {_shown(expected)}")
    moved = _moved(gm)
    if moved != promised.moved:
        key = next(k for k in (*promised.moved, *moved) if moved[k] != promised.moved[k])
        raise StepError(
            f"a step moves {moved[key]} elements by {key[0]} over axis {key[1]!r} ({key[3]}), "
            f"it was built to move {promised.moved[key]}"
        )


def _check_order(gm: GraphModule) -> None:
    """Every call comes after its operands and has a user."""
    made: set[Node] = set()
    for node in gm.graph.nodes:
        if not made.issuperset(node.all_input_nodes):
            late = next(x for x in node.all_input_nodes if x not in made)
            raise StepError(f"{describe(node)} runs before {describe(late)}, which it uses")
        if node.op == "call_function" and not node.users:
            raise StepError(f"{describe(node)} has no user")
        made.add(node)
    for i, value in enumerate(outputs(gm)):
        if isinstance(value, Node) and value.op == "placeholder":
            raise StepError(f"output {i} of a step is its input {value.name}")


def check_gradients(backward: StepGraph, local: GraphModule, dtypes: Mapping[str, torch.dtype]) -> None:
    """The gradients that a backward returns have the local shapes and dtypes of the inputs of the graph that was
    differentiated, or those of ``dtypes``."""
    inputs: dict[str, Any] = {n.name: n for n in placeholders(local)}
    for name, have in zip(backward.outputs, _results(backward.graph), strict=True):
        if is_a(name, "grad"):
            shape, dtype = _type(inputs[of(name)]) or ((), torch.float32)
            expected = shape, dtypes.get(of(name), dtype)
            if have != expected:
                raise StepError(f"the gradient of {of(name)} is {_shown(have)}, the value is {_shown(expected)}")


def _shown(result: Result) -> str:
    return f"{list(result[0])} of {result[1]}" if result is not None else "nothing"


State = tuple[LocalType, ...]  # of a value, one per axis
IN_ORDER = ("G", "GF", "F", "BW", "B", "W", "BWR", "R")


def check_step_types(parts: Sequence[Stage], local: GraphModule, mesh: Mesh) -> None:
    """Every value and every gradient that the stages of a model compute has the type that the local graph implies.

    The placements of inputs are known, operators have rules (`autopar.rules.local_types`), an all-reduce turns partial
    values into replicated ones, and a gradient must have the dual of the placement of its value. So a collective that
    is missing, doubled, of the wrong kind or over the wrong axis is an error, whether the table of conversions,
    differentiation or a pass made the mistake. Each axis is checked by itself; microbatches and token slices are left
    to the runtime.
    """
    axes = {a: n for a, n in mesh.sizes.items() if n > 1 and a != "pp" and a not in IN_TIME}
    promised, flow = _promised(local, tuple(axes)), _Carry(axes)
    for index, part in enumerate(parts):
        known, taken = dict(promised), part.reduce.inputs if part.reduce is not None else []
        for kind in IN_ORDER:
            step = graph_of(part, kind)
            if step is None:
                continue
            made = flow.through(step, known)
            left = {n: made.pop(n) for n in taken if n in made} if kind in ("BW", "B", "W") else {}
            if kind != "BW" or part.backward_reduce is None:  # else the gradients are not reduced yet
                _check_promise(f"{GRAPHS[kind]} of stage {index}", axes, made, promised)
            sums = {earlier_sum(of(name)): state for name, state in {**made, **left}.items() if is_a(name, "grad")}
            known = {**made, **sums, **known, **left}


def _promised(local: GraphModule, axes: Sequence[str]) -> dict[str, State]:
    """Name of a value, or of a gradient -> its local type, as implied by the placements."""
    named = {n.name: n for n in local.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)}
    named |= {output(i): x for i, x in enumerate(outputs(local)) if isinstance(x, Node)}
    return {
        known: tuple(_held(node, axis, known != name) for axis in axes)
        for name, node in named.items()
        for known in (name, grad(name))
    }


def _held(node: Node, axis: str, gradient: bool) -> LocalType:
    own = dual(placement(node, axis)) if gradient else placement(node, axis)
    others = [
        p.dim for a, p in node.meta.get("placements", {}).items() if isinstance(p, Shard) and a not in (axis, "mb")
    ]
    return local_type_of(own, tuple(node.meta["val"].shape), alone=not isinstance(own, Shard) or own.dim not in others)


def _check_promise(
    graph: str, axes: Mapping[str, int], made: Mapping[str, State], promised: Mapping[str, State]
) -> None:
    for name in made.keys() & promised.keys():
        for axis, found, expected in zip(axes, made[name], promised[name], strict=True):
            if not may_be(found, expected):
                raise StepError(
                    f"axis {axis!r}: {graph} computes {name} as {shown(found)}; its placement implies {shown(expected)}"
                )


def _product(node: Node) -> Node:
    """The product of a call that adds it to a sum."""
    graph, factors = Graph(), []
    for x in node.args[1:]:
        assert isinstance(x, Node)
        factors.append(graph.placeholder(x.name))
        factors[-1].meta = x.meta
    made = graph.call_function(PRODUCT_OF[node.target], tuple(factors))
    made.meta = node.meta
    return made


class _Carry:
    """Propagates local types through graphs. Equal calls (of equal layers) are checked once."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        self.axes = axes
        self.made: dict[Any, list[State]] = {}

    def through(self, step: StepGraph, known: Mapping[str, State]) -> dict[str, State]:
        """The local types of a step graph's results, by name."""
        found: dict[Node, list[State]] = {}
        nothing = (UNKNOWN,) * len(self.axes)
        for node, name in zip(placeholders(step.unnamed), step.inputs, strict=True):
            if is_a(name, "sum") and not node.users:
                raise StepError(f"the last backward of a step does not add the accumulated gradient of {of(name)}")
            found[node] = [known.get(name, nothing)]
        named = zip(placeholders(step.unnamed), step.inputs, strict=True)
        sums = {node for node, name in named if is_a(name, "sum") and name not in known}
        if not self.axes:
            return {}
        for node in step.unnamed.graph.nodes:
            if is_call(node, operator.getitem):
                found[node] = [found[node.args[0]][node.args[1]]]
            elif is_call(node, torch.ops.aten.add.Tensor) and node.args[1] in sums:
                found[node] = found[node.args[0]]  # a sum has the type of its addends
            elif node.target in PRODUCT_OF and node.args[0] in sums:
                found[node] = self._call(_product(node), tuple(found[x][0] for x in node.args[1:]))
            elif node.op == "call_function":
                found[node] = self._call(node, tuple(found[x][0] for x in tensor_operands(node)))
        pairs = zip(step.outputs, outputs(step.unnamed), strict=True)
        return {name: found[x][0] for name, x in pairs if name is not None and isinstance(x, Node)}

    def _call(self, node: Node, operands: tuple[State, ...]) -> list[State]:
        key = node.target, frozen(node.args, _fact), frozen(node.kwargs, _fact), operands
        if key not in self.made:
            each = []
            for i, (axis, size) in enumerate(self.axes.items()):
                each.append(held_results(node, axis, size, [x[i] for x in operands]))
                if not all(each[-1]):
                    taken = ", ".join(shown(x[i]) for x in operands)
                    raise StepError(f"axis {axis!r}: {describe(node)} takes {taken}, which are not shards of one value")
            self.made[key] = list(zip(*each, strict=True))
        return self.made[key]


def _fact(x: Any) -> Any:
    """Shape and type of a value; any other argument itself."""
    if isinstance(x, Node):
        val = x.meta["val"]
        return (val.shape, val.dtype) if isinstance(val, torch.Tensor) else None
    return told_apart(x)

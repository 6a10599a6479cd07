"""What ranks hold of every value of a step: types that reach from the inputs of its graphs to the gradients.

The placements of inputs are known, operators have rules (`autopar.rules.local_types`), a sum over ranks makes a whole
of addends, and a gradient must arrive as the dual of the placement of what it is the gradient of. So a collective that
is missing, doubled, of another kind or over another axis is an error, whether the table of conversions, differentiation
or a pass made the mistake. Each axis is looked at by itself; microbatches and token slices are the runtime's.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.adapters.keys import told_apart
from autopar.ir.graph import describe, frozen, is_call, outputs, placeholders, placement, tensor_operands
from autopar.ir.mesh import IN_TIME, Mesh
from autopar.ir.placement import Shard, dual
from autopar.rewrite.step_checks import StepError
from autopar.rules.local_type_rules import held_results
from autopar.rules.local_types import UNKNOWN, LocalType, held_as, may_be, shown
from autopar.steps.graphs import Stage, StepGraph
from autopar.steps.of_rank import GRAPHS, graph_of
from autopar.steps.value_names import earlier_sum, grad, is_a, of, output

State = tuple[LocalType, ...]  # of a value, one per axis
IN_ORDER = ("G", "GF", "F", "BW", "B", "W", "BWR", "R")


def check_step_types(parts: Sequence[Stage], local: GraphModule, mesh: Mesh) -> None:
    """Every value that the parts of a model make is what the typed local graph says of it, and so is every gradient."""
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
            if kind != "BW" or part.backward_reduce is None:  # else these are this rank's own gradients
                _check_promise(f"{GRAPHS[kind]} of part {index}", axes, made, promised)
            sums = {earlier_sum(of(name)): state for name, state in {**made, **left}.items() if is_a(name, "grad")}
            known = {**made, **sums, **known, **left}


def _promised(local: GraphModule, axes: Sequence[str]) -> dict[str, State]:
    """Name of a value, or of a gradient -> how ranks hold it, as the placements say."""
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
    return held_as(own, tuple(node.meta["val"].shape), alone=not isinstance(own, Shard) or own.dim not in others)


def _check_promise(
    graph: str, axes: Mapping[str, int], made: Mapping[str, State], promised: Mapping[str, State]
) -> None:
    for name in made.keys() & promised.keys():
        for axis, found, expected in zip(axes, made[name], promised[name], strict=True):
            if not may_be(found, expected):
                raise StepError(
                    f"axis {axis!r}: {graph} makes {name} as {shown(found)}; its placement says {shown(expected)}"
                )


class _Carry:
    """Carries what ranks hold through graphs. Calls that are alike (equal layers) are looked at once."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        self.axes = axes
        self.made: dict[Any, list[State]] = {}

    def through(self, step: StepGraph, known: Mapping[str, State]) -> dict[str, State]:
        """What a step graph makes, by name."""
        found: dict[Node, list[State]] = {}
        nothing = (UNKNOWN,) * len(self.axes)
        for node, name in zip(placeholders(step.unnamed), step.inputs, strict=True):
            if is_a(name, "sum") and not node.users:
                raise StepError(f"the last backward of a step does not add what the earlier ones made of {of(name)}")
            found[node] = [known.get(name, nothing)]
        if not self.axes:
            return {}
        for node in step.unnamed.graph.nodes:
            if is_call(node, operator.getitem):
                found[node] = [found[node.args[0]][node.args[1]]]
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
                    raise StepError(f"axis {axis!r}: {describe(node)} takes {taken}: no pieces of one value")
            self.made[key] = list(zip(*each, strict=True))
        return self.made[key]


def _fact(x: Any) -> Any:
    """Of an argument; shape and type for a value."""
    if isinstance(x, Node):
        val = x.meta["val"]
        return (val.shape, val.dtype) if isinstance(val, torch.Tensor) else None
    return told_apart(x)

"""What holds of a step graph from its making to its run, whichever pass rewrites it: `promise`, `check_step`.

    backward = promise(differentiate(...).backward)     notes what the graph makes and moves
    PassManager(STEP_PASSES).run(backward, ctx, facts=("step",))     checks it after every pass

Buckets change the number of calls and prefetching their places, but neither what is made nor how many elements are
summed, gathered or exchanged over an axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import arguments, calls_of, describe, outputs, placeholders
from autopar.ops.traits import COLLECTIVES
from autopar.rewrite.compilation import Compilation
from autopar.steps.graphs import StepGraph
from autopar.steps.value_names import is_a, of

Result = tuple[tuple[int, ...], torch.dtype] | None  # shape and dtype of an output; None: no value
Moved = Counter[tuple[str, str, str, str]]  # (collective, axis, what reduces, dtype) -> elements that go in


class StepError(Exception):
    """A step graph that is not what it was made as: a wrong gradient. Always a mistake of a pass, never of a user."""


@dataclass(frozen=True)
class Promise:
    """What a step graph makes, and what it moves between ranks."""

    results: tuple[Result, ...]
    moved: Moved


def promise(gm: GraphModule) -> GraphModule:
    """The graph, with a note of what it makes and moves now."""
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
        for axis in known["axis"].split(","):  # a sum over joined axes is one over each
            found[str(node.target), axis, known.get("op", ""), str(x.dtype)] += x.numel()
    return found


def check_step(gm: GraphModule, ctx: Compilation) -> None:
    """Nothing dangles, no input is returned, and the graph makes and moves what it promised."""
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
            f"it was made to move {promised.moved[key]}"
        )


def _check_order(gm: GraphModule) -> None:
    """Every call has what it takes before it, and somebody who takes what it makes."""
    made: set[Node] = set()
    for node in gm.graph.nodes:
        if not made.issuperset(node.all_input_nodes):
            late = next(x for x in node.all_input_nodes if x not in made)
            raise StepError(f"{describe(node)} runs before {describe(late)}, which it takes")
        if node.op == "call_function" and not node.users:
            raise StepError(f"{describe(node)} is made for nobody")
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

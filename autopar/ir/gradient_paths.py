"""Which parameters the outputs of a captured graph have gradients for, against those that an eager backward reaches.

A parameter that torch reaches and the graph does not would stand still; one that the graph reaches alone would be
trained. Both are refused, by name: something in the forward acts on autograd where capture does not look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from autopar.adapters.grad_fn_paths import GradFnPaths, start_of
from autopar.ir.graph import fake_mode, outputs, placeholders, tensor_operands, values
from autopar.ir.meta import signature_of
from autopar.ir.signature import InputSpec
from autopar.ops.traits import STOPS_GRADIENT

_SHOWN = 4


def refuse_other_gradients(gm: GraphModule, eager: Sequence[frozenset[str] | None]) -> None:
    """``eager``: for each leaf of the forward's result, the parameters that its backward reaches; None: not known.

    Raises ValueError that names parameters which a step would train otherwise than torch.
    """
    signature = signature_of(gm)
    expected = {i: names for i, names in zip(signature.leaves, eager, strict=True) if isinstance(i, int)}
    trained = [spec for spec in signature.inputs if spec.kind == "parameter" and spec.requires_grad]
    found = _reached(gm, trained)
    if all(names in (None, found[i]) for i, names in expected.items()):
        return
    found = _reached_exactly(gm, trained)
    for i, names in expected.items():
        if names is not None and names != found[i]:
            _refuse(signature.outputs[i].name, sorted(names - found[i]), sorted(found[i] - names))


def _refuse(output: str, lost: Sequence[str], more: Sequence[str]) -> None:
    names = lost or more
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    here, there = ("does not reach", "does") if lost else ("reaches", "does not")
    raise ValueError(
        f"capture: a step must train what torch trains, found that the backward of {output} {here} {shown} in the "
        f"captured graph, and {there} in torch; the forward acts on autograd other than by torch functions, or writes "
        "under no_grad to a value with a gradient: use torch.where or an autograd.Function"
    )


def _reached(gm: GraphModule, trained: Sequence[InputSpec]) -> list[frozenset[str]]:
    """Of each output, the parameters behind it; more of them, where an operator has several results."""
    numbers = {spec.node: i for i, spec in enumerate(trained)}
    bits: dict[Node, int] = {}
    for node in gm.graph.nodes:
        bits[node] = 1 << numbers[node.name] if node.name in numbers else 0
        if node.op == "call_function" and node.target not in STOPS_GRADIENT and any(map(_is_float, values(node))):
            for x in tensor_operands(node):
                bits[node] |= bits[x]
    return [_names(trained, bits[x] if isinstance(x, Node) else 0) for x in outputs(gm)]


def _reached_exactly(gm: GraphModule, trained: Sequence[InputSpec]) -> list[frozenset[str]]:
    """The same, as autograd says when the graph is run on fakes."""
    numbers = {spec.node: i for i, spec in enumerate(trained)}
    with torch.enable_grad(), fake_mode(gm.graph):
        given = [
            node.meta["val"].detach().requires_grad_(node.name in numbers)
            if isinstance(node.meta["val"], Tensor)
            else node.meta["val"]
            for node in placeholders(gm)
        ]
        made = Interpreter(gm).run(*given)
    leaves = {numbers[node.name]: x for node, x in zip(placeholders(gm), given) if node.name in numbers}
    paths = GradFnPaths({start_of(x): 1 << i for i, x in leaves.items()})
    return [_names(trained, paths.reached(x) if isinstance(x, Tensor) else 0) for x in made]


def _names(trained: Sequence[InputSpec], bits: int) -> frozenset[str]:
    return frozenset(spec.name for i, spec in enumerate(trained) if bits & 1 << i)


def _is_float(x: Any) -> bool:
    return bool(x.dtype.is_floating_point or x.dtype.is_complex)

"""Which parameters the outputs of a captured graph have gradients for, against those of an eager backward.

A parameter that torch would reach and the graph does not would stand still; one that the graph reaches alone would be
trained. Both are refused, by name: something in the forward acts on autograd where capture does not look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Node

from autopar.ir.graph import tensor_operands, values
from autopar.ir.meta import signature_of
from autopar.ops.traits import STOPS_GRADIENT


def refuse_other_gradients(gm: GraphModule, eager: Sequence[frozenset[str] | None]) -> None:
    """``eager``: for each leaf of the forward's result, the parameters that its backward reaches; None: not known.

    Raises ValueError that names parameters which a step would train otherwise.
    """
    signature, reached = signature_of(gm), _reached(gm)
    results: Any = gm.graph.output_node().args[0]
    for leaf, expected in zip(signature.leaves, eager, strict=True):
        if not isinstance(leaf, int) or expected is None:
            continue
        found = frozenset(reached[results[leaf]])
        if found != expected:
            output = signature.outputs[leaf].name
            lost, more = sorted(expected - found), sorted(found - expected)
            raise ValueError(f"capture: NET {output}: lost {lost} more {more}")


def _reached(gm: GraphModule) -> dict[Node, frozenset[str]]:
    """Value -> the trained parameters that a gradient of it would flow to."""
    specs = [spec for spec in signature_of(gm).inputs if spec.kind == "parameter" and spec.requires_grad]
    bits: dict[Node, int] = {}
    numbers = {spec.node: i for i, spec in enumerate(specs)}
    for node in gm.graph.nodes:
        bits[node] = 0
        if node.op == "placeholder" and node.name in numbers:
            bits[node] = 1 << numbers[node.name]
        elif node.op == "call_function" and node.target not in STOPS_GRADIENT:
            if any(x.dtype.is_floating_point or x.dtype.is_complex for x in values(node)):
                for x in tensor_operands(node):
                    bits[node] |= bits[x]
    results: Any = gm.graph.output_node().args[0]
    return {x: frozenset(s.name for i, s in enumerate(specs) if bits[x] & 1 << i) for x in results}

"""What `cut_experts` and `cut_mlps` have in common: a part of a graph that becomes a graph of its own, whose inputs are
tokens, their experts and weights, and parameters of the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.adapters.fx.graph_nodes import copied_node
from autopar.adapters.fx.lazy import graph_module
from autopar.ir.graph import add_placeholder, describe, placeholders, reach
from autopar.ir.meta import input_specs, signature_of
from autopar.ir.signature import InputSpec, OutputSpec, Signature

WAY_OUT = "serve the model without roles"
GIVEN = ("x", "expert", "weights")  # the arguments of `ask_experts` that are tensors
FIXED = ("parameter", "buffer", "constant")


@dataclass(frozen=True)
class CutLayer:
    """One layer's part: a global graph with a signature, whose inputs are those of `GIVEN` that it has, then what
    ``names`` says: parameters, buffers and constants of the model. It returns what `ask_experts` does."""

    graph: GraphModule
    names: tuple[str, ...]


def extracted_part(
    gm: GraphModule, part: Collection[Node], given: dict[str, Node], result: Node, without: Node | None = None
) -> CutLayer:
    """The graph of a part that computes ``result`` from ``given`` values, parameters, buffers and constants. Raises
    ValueError, with the value, if anything else crosses, in or out; ``without`` will be gone."""
    specs = input_specs(gm)
    live = {n for n in placeholders(gm) if specs[n.name].kind not in FIXED}
    live = set(reach(live, lambda node: node.users))
    for node in part:
        for x in node.all_input_nodes:
            if x not in part and x not in given.values() and x in live:
                raise ValueError(_crosses(f"{describe(node)} reads {describe(x)}"))
        for user in node.users if node is not result else ():
            if user not in part and user is not without:
                raise ValueError(_crosses(f"{describe(user)} reads {describe(node)}"))
    graph, copies = Graph(), dict[Node, Node]()
    inputs = list[InputSpec]()
    for name, node in given.items():
        copies[node] = add_placeholder(graph, name)
        copies[node].meta = {"val": node.meta["val"], "has_gradient": False}
        inputs.append(InputSpec(copies[node].name, "input", name))
    needed = set(reach([result], lambda node: [x for x in node.all_input_nodes if x not in copies]))
    for node in (n for n in gm.graph.nodes if n in needed):
        copies[node] = copied_node(graph, node, copies.__getitem__)
        if node.op == "placeholder":
            inputs.append(replace(specs[node.name], node=copies[node].name))
    graph.output((copies[result],))
    made = graph_module(graph, "Experts")
    made.meta = {k: v for k, v in gm.meta.items() if k == "constants"}
    made.meta["signature"] = Signature(tuple(inputs), (OutputSpec("output", "y"),))
    return CutLayer(made, tuple(s.name for s in inputs[len(given) :]))


def _crosses(what: str) -> str:
    return f"serve: between roles only tokens, their experts and weights may cross, found that {what}; {WAY_OUT}"


def take_out(gm: GraphModule, names: Iterable[str]) -> None:
    """Remove the inputs of a graph that are parameters of these names. Raises ValueError if it still reads one."""
    kept, gone = list[InputSpec](), set(names)
    nodes = {n.name: n for n in placeholders(gm)}
    for spec in signature_of(gm).inputs:
        node = nodes[spec.node]
        if spec.kind not in FIXED or spec.name not in gone or (spec.kind != "parameter" and node.users):
            kept.append(spec)
            continue
        if node.users:
            user = describe(next(iter(node.users)))
            raise ValueError(_crosses(f"{user} reads {spec.name}, a parameter of experts"))
        gm.graph.erase_node(node)
    gm.meta["signature"] = replace(signature_of(gm), inputs=tuple(kept))
    gm.recompile()


def alike(layers: Sequence[CutLayer]) -> list[int]:
    """For each layer the first that computes the same from inputs of the same shapes and kinds."""
    first: dict[object, int] = {}
    return [first.setdefault(_structure(layer.graph), k) for k, layer in enumerate(layers)]


def _structure(gm: GraphModule) -> object:
    specs, numbers = input_specs(gm), {node: i for i, node in enumerate(gm.graph.nodes)}
    found = list[object]()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            val = node.meta["val"]
            found.append((specs[node.name].kind, tuple(val.shape), val.dtype, tuple(val.stride())))
        else:
            args = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: f"%{numbers[x]}")
            found.append((node.op, str(node.target), str(args)))
    return tuple(found)

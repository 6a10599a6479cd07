"""cut_experts: from a model's graph to what attention's role runs, and a graph for the experts of each layer.

Consumes    a normalized global graph of a forward that nobody differentiates.
Guarantees  the calls from a layer's `moe_dispatch` to its `moe_combine` are one `autopar::ask_experts`, and a graph of
            their own. That takes tokens, the numbers of their experts, their weights, and the layer's parameters,
            buffers and constants; nothing else. What is left reads no parameter of experts, and has no input for one.
Leaves      routers, shared experts and everything else.

    rows, order, offsets = moe_dispatch(x, expert, E)        -->    y = ask_experts(x, expert, weights, 0)
    made = grouped_mm(act(grouped_mm(rows, w1, offsets)), w2, offsets)
    y = moe_combine(made, order, weights)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.adapters.fx.graph_nodes import copied_node
from autopar.adapters.fx.lazy import graph_module
from autopar.ir.expert_layers import dispatch_of, part_of_experts
from autopar.ir.graph import (
    add_placeholder,
    arguments,
    calls_of,
    describe,
    insert_call,
    is_call,
    placeholders,
    reach,
    remove_dead_code,
    set_argument,
    shape,
)
from autopar.ir.meta import input_specs, signature_of
from autopar.ir.signature import InputSpec, OutputSpec, Signature
from autopar.ops.traits import FILL_VALUES

aten, ours = torch.ops.aten, torch.ops.autopar
WAY_OUT = "serve the model without roles"
GIVEN = ("x", "expert", "weights")  # the arguments of `ask_experts` that are tensors
FIXED = ("parameter", "buffer", "constant")


@dataclass(frozen=True)
class CutLayer:
    """One layer's part: a global graph with a signature, whose inputs are those of `GIVEN` that it has, then what
    ``names`` says: parameters, buffers and constants of the model. It returns what `ask_experts` does."""

    graph: GraphModule
    names: tuple[str, ...]


def cut_experts(gm: GraphModule) -> list[CutLayer]:
    """Cut the experts of all layers out of a graph, in place; the k-th answers ``ask_experts(..., k)``. Raises
    ValueError for a model without experts, and with the value where something else crosses the cut."""
    combines = calls_of(gm.graph, ours.moe_combine.default)
    if not combines:
        raise ValueError(
            "serve: roles need a model with experts that autopar knows (autopar::moe_dispatch), found none; cut its "
            'MLPs by apart="mlp"'
        )
    cut = [_cut(gm, combine, k) for k, combine in enumerate(combines)]
    take_out(gm, {name for layer in cut for name in layer.names})
    return cut


def _cut(gm: GraphModule, combine: Node, number: int) -> CutLayer:
    dispatch = dispatch_of(combine)
    part = part_of_experts(combine)
    given = {"x": arguments(dispatch)["x"], "expert": arguments(dispatch)["expert"]}
    given["weights"] = _weights(combine, part, dispatch)
    _check_width(combine, given["x"])
    layer = extracted_part(gm, part, given, combine)
    asked = insert_call(combine, ours.ask_experts.default, (*given.values(), number), like=combine)
    combine.replace_all_uses_with(asked)
    remove_dead_code(gm)
    return layer


def _weights(combine: Node, part: Collection[Node], dispatch: Node) -> Node:
    """The weights of a combine; made ahead of the experts where they are the same for all tokens."""
    weights: Node = arguments(combine)["weights"]
    if weights not in part or not is_call(weights, *FILL_VALUES):
        return weights
    val, value = weights.meta["val"], FILL_VALUES[weights.target](weights)  # type: ignore[index]
    args = (arguments(dispatch)["x"], list(val.shape), value)
    made = insert_call(dispatch, aten.new_full.default, args, {"dtype": val.dtype}, like=weights)
    set_argument(combine, "weights", made)
    return made


def _check_width(combine: Node, x: Node) -> None:
    if shape(combine) != shape(x) or combine.meta["val"].dtype != x.meta["val"].dtype:
        found = f"{list(shape(x))} in {x.meta['val'].dtype} to {list(shape(combine))} in {combine.meta['val'].dtype}"
        raise ValueError(
            f"serve: roles need experts that return tokens as they get them, found {found} at {describe(combine)}; "
            f"{WAY_OUT}"
        )


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

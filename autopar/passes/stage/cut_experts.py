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

from collections.abc import Collection

import torch
from torch.fx import GraphModule, Node

from autopar.ir.expert_layers import dispatch_of, part_of_experts
from autopar.ir.graph import (
    arguments,
    calls_of,
    describe,
    insert_call,
    is_call,
    remove_dead_code,
    set_argument,
    shape,
)
from autopar.ops.traits import FILL_VALUES
from autopar.passes.stage.cut_layers import WAY_OUT, CutLayer, extracted_part, take_out
from autopar.passes.stage.cut_mlps import mlps_of

aten, ours = torch.ops.aten, torch.ops.autopar


def cut_experts(gm: GraphModule) -> list[CutLayer]:
    """Cut the experts of all layers out of a graph, in place; the k-th answers ``ask_experts(..., k)``. Raises
    ValueError for a model without experts, and with the value where something else crosses the cut."""
    combines = calls_of(gm.graph, ours.moe_combine.default)
    if not combines:
        raise ValueError(
            "serve: roles need a model with experts that autopar knows (autopar::moe_dispatch), found none; "
            + ('cut its MLPs by apart="mlp"' if mlps_of(gm) else WAY_OUT)
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

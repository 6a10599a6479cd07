"""Forwards that compute the logits of the last token alone, as nanoGPT's does without targets.

    h_n = index(h, [None, [-1]]); logits = linear(h_n, w)    -->    logits = linear(h, w)

A server selects the rows whose logits are wanted itself, so the selection is taken out: then logits are of all tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autopar.ir.graph import run_fake, shape
from autopar.ir.meta import input_specs

aten = torch.ops.aten


def with_all_tokens(gm: GraphModule, logits: Node, total: int) -> Node:
    """Take the selection of the last of ``total`` tokens out of the way to the logits, if it is there and what follows
    it works on any number of tokens. Returns the logits."""
    if len(shape(logits)) not in (2, 3) or (len(shape(logits)) == 3 and shape(logits)[1] != 1) or total == 1:
        return logits
    behind = [logits]
    while not _takes_last(gm, behind[-1], total):
        operands = [
            x for x in behind[-1].all_input_nodes if shape(x)[:1] == shape(logits)[:1] and x.op != "placeholder"
        ]
        if len(operands) != 1 or len(behind[-1].users) != 1:
            return logits
        behind.append(operands[0])
    chosen = behind.pop()
    before = {node: node.meta["val"] for node in behind}
    x = chosen.args[0]
    assert isinstance(x, Node)
    chosen.replace_all_uses_with(x)
    found = behind[0] if behind else x
    try:
        for node in reversed(behind):
            node.meta["val"] = run_fake(node.graph, node.target, node.args, node.kwargs)  # type: ignore[arg-type]
        fits = shape(found)[:2] == shape(x)[:2] and len(shape(found)) == 3
    except (RuntimeError, IndexError, ValueError, TypeError):
        fits = False
    if fits:
        gm.graph.erase_node(chosen)
        return found
    for user in list(x.users):
        if user in before:
            user.replace_input_with(x, chosen)
    for node, val in before.items():
        node.meta["val"] = val
    return logits


def _takes_last(gm: GraphModule, node: Node, total: int) -> bool:
    """Whether a node takes the last token of [rows, ``total``, ..]."""
    if node.op != "call_function" or not node.args or not isinstance(x := node.args[0], Node):
        return False
    if not isinstance(x.meta.get("val"), Tensor) or x.meta["val"].dim() < 3 or shape(x)[1] != total:
        return False
    last = (-1, total - 1)
    if node.target is aten.slice.Tensor and len(node.args) > 2 and node.args[1] in (1, 1 - len(shape(x))):
        return node.args[2] in last and shape(node)[1] == 1
    if node.target is aten.select.int:
        return node.args[1] in (1, 1 - len(shape(x))) and node.args[2] in last
    if node.target is aten.index.Tensor:
        indices: Any = node.args[1]
        rows, *at = indices
        return rows is None and len(at) == 1 and isinstance(at[0], Node) and _constant(gm, at[0]) in last
    return False


def _constant(gm: GraphModule, index: Node) -> Any:
    """The only entry of an index that is a constant of the model."""
    while index.op == "call_function" and len(index.all_input_nodes) == 1 and shape(index) == (1,):
        index = index.all_input_nodes[0]
    spec = input_specs(gm).get(index.name) if index.op == "placeholder" else None
    value = gm.meta.get("constants", {}).get(spec.name) if spec is not None else None
    return int(value) if isinstance(value, Tensor) and value.shape == (1,) and not value.is_meta else None

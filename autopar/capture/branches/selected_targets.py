"""CTC targets selected from padded rows: the padded rows are used instead, so that no size is data-dependent.

ctc_loss(x, masked_select(labels, mask), lengths, sum(mask, -1))
    --> ctc_loss(x, gather(labels, -1, sort(mask, descending)[1]), lengths, sum(mask, -1))
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

aten = torch.ops.aten
_LOSS = "autopar.ctc_loss.default"  # log_probs, targets, input_lengths, target_lengths, ...
_SAME_NUMBERS = (aten.view.default, aten.reshape.default, aten.alias.default, aten._to_copy.default, aten.to.dtype)


def keep_rows_of_targets(graph: Graph) -> None:
    """See the file's docstring."""
    for node in list(graph.nodes):
        if str(node.target) != _LOSS or not isinstance(node.args[1], Node):
            continue
        picked, counts = node.args[1], _base(node.args[3])
        if picked.target is not aten.masked_select.default or counts.target is not aten.sum.dim_IntList:
            continue
        labels, mask = picked.all_input_nodes
        if mask.meta["val"].dim() == 2 and labels.meta["val"].shape == mask.meta["val"].shape and _rows(counts, mask):
            order = _insert(node, aten.sort.stable, mask, stable=True, dim=-1, descending=True)
            places = _insert(node, operator.getitem, order, 1)
            node.replace_input_with(picked, _insert(node, aten.gather.default, labels, -1, places))


def _base(x: Any) -> Node:
    found: Node = x
    while found.target in _SAME_NUMBERS:
        found = found.all_input_nodes[0]
    return found


def _rows(counts: Node, mask: Node) -> bool:
    """Whether ``counts`` is how many entries of each row of the mask are true."""
    over: Any = counts.args[1]
    return counts.args[0] is mask and [d % 2 for d in over] == [1]


def _insert(before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    given, named = map_arg((args, kwargs), lambda x: x.meta["val"])
    node.meta = {**before.meta, "val": target(*given, **named)}
    return node

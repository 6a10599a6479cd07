"""prefetch: start ZeRO-3's gathers, and copies from host memory, one layer before their use.

Consumes    a step graph (F or B) in which gathers of parameters and copies from the host stand right before their first
            use.
Guarantees  every gather of a layer starts where the previous layer (in execution order) starts to compute, every copy
            where that layer first uses a copied value, so that it overlaps one layer; at most two layers of gathered
            weights, and of values copied back, are alive.
Leaves      gathers of activations; copies to the host, which start right after their operand is computed; the order
            among gathers and among copies.

    w1 = gather(p1); y = mm(x, w1); w2 = gather(p2); z = mm(y, w2)
        -->
    w1 = gather(p1); w2 = gather(p2); y = mm(x, w1); z = mm(y, w2)
"""

from __future__ import annotations

import itertools

import torch
from torch.fx import GraphModule, Node

from autopar.ir.conversions import is_cast_input
from autopar.ir.graph import calls_of, layer_of
from autopar.rewrite.checks import gathers_by_layer, is_parameter_gather
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass


class Prefetch(Pass):
    """Moves gathers of parameters, and copies from the host, up by one layer."""

    name = "prefetch"
    requires = ("step",)
    ensures = ("gathers_together",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        groups = gathers_by_layer(gm)
        anchors = [_first_compute(group[0]) for group in groups]
        for i, group in enumerate(groups):
            casts = (x for node in group for x in node.all_input_nodes if is_cast_input(x))
            for node in (*dict.fromkeys(casts), *group):  # casts first, so that gathers are adjacent
                anchors[max(i - 1, 0)].prepend(node)
        place = {node: i for i, node in enumerate(gm.graph.nodes)}
        copies = calls_of(gm.graph, torch.ops.autopar.from_host.default)
        layers = [list(group) for _, group in itertools.groupby(copies, layer_of)]
        uses: list[Node] = [min((u for x in layer for u in x.users), key=place.__getitem__) for layer in layers]
        for before, layer in zip(uses, layers[1:]):
            for node in layer:
                before.prepend(node)
        gm.recompile()
        return gm


def _first_compute(node: Node) -> Node:
    """The first node after a gather that is not a gather."""
    while is_parameter_gather(node) or is_cast_input(node):
        node = node.next
    return node

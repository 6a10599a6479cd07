"""split_biases: separate the bias from products whose contracted dim is sharded by the plan.

Consumes    a canonical global graph and a plan.
Guarantees  no linear or convolution with a sharded contraction adds a bias, which would be added once per rank.
Leaves      every other product fused with its bias.

    y = linear(x, w, b)            -->    y0 = linear(x, w)
                                          y = add(y0, b)
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from autopar.ir.conversions import uncast
from autopar.ir.graph import arguments, insert_call, is_call, set_argument, shape
from autopar.ir.meta import names_of_parameters
from autopar.ir.placement import Placement, Shard
from autopar.ops.traits import CONVOLUTIONS, PERMUTED, TRANSPOSED_CONVOLUTIONS
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass

aten = torch.ops.aten


class SplitBiases(Pass):
    """linear(x, w, b) -> add(linear(x, w), b) where w's contracted dim is sharded: for a transposed convolution the
    first."""

    name = "split_biases"
    requires = ("functional",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        assert ctx.plan is not None
        names = names_of_parameters(gm)
        for node in list(gm.graph.nodes):
            if not is_call(node, aten.linear.default, *CONVOLUTIONS) or arguments(node)["bias"] is None:
                continue
            weight, transposed = _behind_transpose(node)
            weight = uncast(weight)
            placed: list[Placement | None] = [ctx.plan.weight_pieces.get(weight.name)]
            if weight.name in names:
                placed += [ctx.plan.parameter(names[weight.name], a).used for a in ctx.mesh.cut_order]
            if any(isinstance(p, Shard) and p.dim == (0 if transposed else 1) for p in placed):
                _split(node)
        gm.recompile()
        return gm


def _behind_transpose(node: Node) -> tuple[Node, bool]:
    """The weight of a product, and whether its first dim is contracted."""
    weight = arguments(node)["weight"]
    if node.target in TRANSPOSED_CONVOLUTIONS:
        return weight, True
    if is_call(weight, *PERMUTED) and isinstance(weight.args[0], Node) and len(shape(weight)) == 2:
        return weight.args[0], True
    return weight, False


def _split(node: Node) -> None:
    bias = arguments(node)["bias"]
    set_argument(node, "bias", None)
    after = node.next
    if is_call(node, *CONVOLUTIONS):
        space = len(shape(arguments(node)["weight"])) - 2  # there may be no batch dim
        bias = insert_call(after, aten.view.default, (bias, [-1, *[1] * space]), like=bias)
    total = insert_call(
        after, aten.add.Tensor, (node, bias), like=node, val=node.meta["val"], name=f"{node.name}_biased"
    )
    node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)

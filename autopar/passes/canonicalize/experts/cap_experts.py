"""cap_experts: an expert takes a limited number of the tokens of a step.

Consumes    a canonical global graph and a plan whose options set a capacity.
Guarantees  every dispatch gets the pairs of token and expert within the experts' capacity, counted over all tokens in
            order; the combine's weights of dropped pairs are 0. The remaining weights are not renormalized.
Leaves      the router's choices, and what auxiliary losses count.
No-op       without a capacity.

    rows, order, ends = moe_dispatch(x, expert, 8); ...; y = moe_combine(rows, order, w)
        -->
    kept = within_capacity(expert, 8, 20)
    rows, order, ends = moe_dispatch(x, kept, 8); ...; y = moe_combine(rows, order, masked_fill(w, ge(kept, 8), 0))

The operator needs all tokens. Where tokens are sharded, conversions gather the expert indices before it, so which pairs
are dropped does not depend on the mesh.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from autopar.ir.expert_layers import dispatches, layer_of_dispatch, pairs_per_expert
from autopar.ir.graph import arguments, insert_call, is_call, set_argument
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass

aten, ours = torch.ops.aten, torch.ops.autopar


class CapExperts(Pass):
    """See the module's docstring."""

    name = "cap_experts"
    requires = ("functional",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        assert ctx.plan is not None
        if ctx.plan.options.capacity_factor:
            for dispatch in dispatches(gm):
                _cap(dispatch, ctx.plan.options.capacity_factor)
            gm.recompile()
        return gm


def _cap(dispatch: Node, factor: float) -> None:
    args = arguments(dispatch)
    experts = int(args["num_experts"])
    limit = pairs_per_expert(dispatch, factor)
    kept = insert_call(dispatch, ours.within_capacity.default, (args["expert"], experts, limit))
    set_argument(dispatch, "expert", kept)
    dropped = insert_call(dispatch, aten.ge.Scalar, (kept, experts))
    for node in layer_of_dispatch(dispatch):
        if is_call(node, ours.moe_combine.default):
            weights = arguments(node)["weights"]
            set_argument(node, "weights", insert_call(node, aten.masked_fill.Scalar, (weights, dropped, 0.0)))

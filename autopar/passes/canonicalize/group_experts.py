"""group_experts: loops over experts become a dispatch, grouped products and a combine.

Consumes    the captured graph: flat, functional, with shapes of the global batch.
Guarantees  a sum over experts of what each makes of the tokens that chose it, equal but for weights, is one
            `autopar::moe_dispatch`, products with the stacked weights, and one `autopar::moe_combine`.
Leaves      everything else; a loop that differs between experts computes all tokens with each, and a warning says why.
No-op       without loops over experts.

    y = y + where(index == 0, w * mlp0(x), 0)         rows, order, offsets = moe_dispatch(x, index, 2)
    y = y + where(index == 1, w * mlp1(x), 0)   -->   y = y + moe_combine(mlp01(rows, offsets), order, w)
"""

from __future__ import annotations

import warnings

from torch.fx import GraphModule

from autopar.ir.graph import described_at, remove_dead_code
from autopar.passes.canonicalize.expert_loops import NotGrouped, expert_loops
from autopar.passes.canonicalize.expert_rows import grouped
from autopar.passes.canonicalize.expert_sorts import dispatched, sorted_layers
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass


class GroupExperts(Pass):
    """See the module's docstring."""

    name = "group_experts"

    def apply(self, gm: GraphModule, ctx: Compilation | None = None) -> GraphModule:
        changed = False
        for loop in expert_loops(gm.graph):
            try:
                grouped(loop)
                changed = True
            except NotGrouped as reason:
                end = loop.turns[-1].end
                warnings.warn(
                    f"experts: the loop over {len(loop.turns)} experts {described_at(end)} is not grouped, so each of "
                    f"them computes every token: {reason}",
                    stacklevel=2,
                )
        for products in sorted_layers(gm.graph):
            try:
                dispatched(products)
                changed = True
            except NotGrouped as reason:
                warnings.warn(
                    f"experts: the grouped products {described_at(products[0])} run on all rows everywhere: {reason}",
                    stacklevel=2,
                )
        if changed:
            remove_dead_code(gm)
            gm.graph.lint()
            gm.recompile()
        return gm

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
from collections.abc import Callable, Iterator
from functools import partial

from torch.fx import GraphModule

from autopar.ir.graph import described_at, remove_dead_code
from autopar.passes.canonicalize.experts.expert_lists import expert_lists, grouped_list
from autopar.passes.canonicalize.experts.expert_loops import NotGrouped, expert_loops
from autopar.passes.canonicalize.experts.expert_rows import grouped
from autopar.passes.canonicalize.experts.expert_sorts import dispatched, sorted_layers
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass


class GroupExperts(Pass):
    """See the module's docstring."""

    name = "group_experts"

    def apply(self, gm: GraphModule, ctx: Compilation | None = None) -> GraphModule:
        tried = False
        for replace, left in _layers(gm, lists=ctx is not None and ctx.mesh.size("ep") > 1):
            tried = True
            try:
                replace()
            except NotGrouped as reason:
                warnings.warn(f"experts: {left}: {reason}", stacklevel=2)
        if tried:
            remove_dead_code(gm)
            gm.graph.lint()
            gm.recompile()
        return gm


def _layers(gm: GraphModule, lists: bool) -> Iterator[tuple[Callable[[], None], str]]:
    """(what replaces a layer of experts, what is said if it cannot). ``lists``: those that only ep needs grouped."""
    for loop in expert_loops(gm.graph):
        where = f"the loop over {len(loop.turns)} experts {described_at(loop.turns[-1].end)}"
        yield partial(grouped, loop), f"{where} is not grouped, so each of them computes every token"
    for products in sorted_layers(gm.graph):
        where = f"the grouped products {described_at(products[0])}"
        yield partial(dispatched, products), f"{where} run on all rows everywhere"
    for one in expert_lists(gm) if lists else ():
        where = f"the list of {len(one.pieces)} experts {described_at(one.join)}"
        yield partial(grouped_list, one), f"{where} is not grouped, so every rank computes all of them"

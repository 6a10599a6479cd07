"""fuse_accumulation: the product that is a parameter's gradient adds to the sum of earlier microbatches in place.

Consumes    a backward step graph that takes sums of gradients (`autopar.passes.stage.accumulate_gradients`).
Guarantees  a product, of matrices or of elements, that is only added to a sum takes the sum as its first addend; so
            does the first of a chain of products that add to each other. Sums are donated, so it overwrites the sum
            (`autopar.ir.waits.overwritten`): two passes over the memory of a gradient instead of four, and no gradient
            beside its sum. Megatron-LM calls it gradient accumulation fusion. In the first microbatch of a step it runs
            as the product alone.
Leaves      gradients that are no products, those that are cast to the dtype of the sum, and those that are reduced over
            ranks before they are added.

    g = mm(dy, x); total = add(g, earlier_w)     -->    total = addmm(earlier_w, dy, x)
    g = mul(dw, t); total = add(g, earlier_w)    -->    total = addcmul(earlier_w, dw, t)    (dw of a loss in chunks)
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import insert_call, is_call, placeholders
from autopar.ir.waits import SUM_OF
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass

aten = torch.ops.aten


class FuseAccumulation(Pass):
    """See the module's docstring."""

    name = "fuse_accumulation"
    requires = ("step",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        for earlier in placeholders(gm):
            if earlier.meta.get("donated") and len(earlier.users) == 1:
                _fuse(earlier, *earlier.users)
        gm.recompile()
        return gm


def _fuse(earlier: Node, total: Node) -> None:
    last, given = total.args[:2]
    if not is_call(total, aten.add.Tensor) or total.kwargs or given is not earlier or not isinstance(last, Node):
        return
    first, user = last, total
    while is_call(first, aten.addmm.default) and _only_adds(first, user) and isinstance(first.args[0], Node):
        first, user = first.args[0], first
    if first.target in SUM_OF and _only_adds(first, user) and _fit(first, earlier):
        product = insert_call(first, SUM_OF[first.target], (earlier, *first.args), like=first, val=first.meta["val"])
        total.replace_all_uses_with(product if last is first else last)
        first.replace_all_uses_with(product)
        total.graph.erase_node(total)
        first.graph.erase_node(first)


def _only_adds(x: Node, user: Node) -> bool:
    """Whether ``user`` is all that reads x, and has its shape and dtype."""
    return list(x.users) == [user] and _alike(x, user) and not x.kwargs


def _fit(product: Node, earlier: Node) -> bool:
    """Whether a product has the shape of the sum, and its dtype, as its factors have, scalars aside."""
    factors = [x.meta["val"] for x in product.args if isinstance(x, Node)]
    dtypes = {x.dtype for x in factors if x.dim()}
    return len(factors) == 2 and _alike(product, earlier) and dtypes == {earlier.meta["val"].dtype}


def _alike(x: Node, y: Node) -> bool:
    own, other = x.meta["val"], y.meta["val"]
    return bool((own.shape, own.dtype) == (other.shape, other.dtype))

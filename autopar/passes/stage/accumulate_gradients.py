"""accumulate_gradients: reduce gradients once per step, not once per microbatch.

Consumes    a backward step graph whose gradients end in reductions over ranks.
Guarantees  two graphs. BW stops before the reductions and returns this rank's unreduced gradients. BWR, the last of a
            step, takes the gradients accumulated so far as further inputs (``earlier_0``, ...), adds them, and reduces.
Leaves      reductions of activations, which every microbatch needs; reductions that several gradients share (those of
            ``w1 + w2.t()``), which every microbatch runs as well.

    g = mm(dy, x); r = all_reduce(g, "dp"); return r
        -->
    BW:   return mm(dy, x)
    BWR:  g = add(mm(dy, x), earlier_0); r = all_reduce(g, "dp"); return r
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from autopar.ir.compute_dtypes import added_in
from autopar.ir.graph import add_placeholder, copy_graph, insert_call, is_call, output_node, outputs, remove_dead_code
from autopar.passes.autodiff.clone_aliased_grads import clone_aliased_grads
from autopar.passes.autodiff.widen_reductions import CAST, behind_sums
from autopar.precision import Precision
from autopar.steps.graphs import StepGraph, earlier_sum, of

aten = torch.ops.aten


def split_accumulation(backward: StepGraph, precision: Precision, whole: bool = False) -> tuple[StepGraph, StepGraph]:
    """(BW, BWR): see the module's docstring. ``whole``: reductions that shard a gradient stay in every microbatch; only
    those after them, and those of unsharded gradients, move to the last one. The graph is not changed."""
    own = StepGraph(_local(copy_graph(backward.graph), whole), backward.inputs, backward.outputs)
    last = _last(copy_graph(backward.graph), precision, whole)
    sums = [earlier_sum(of(name)) for name in backward.outputs if name is not None]
    return own, StepGraph(last, [*backward.inputs, *sums], backward.outputs)


def _local(gm: GraphModule, whole: bool) -> GraphModule:
    out = output_node(gm)
    out.args = (tuple(behind_sums(g, whole)[0] if isinstance(g, Node) else None for g in outputs(gm)),)
    remove_dead_code(gm)
    clone_aliased_grads(gm)
    return gm


def _last(gm: GraphModule, precision: Precision, whole: bool) -> GraphModule:
    out = output_node(gm)
    gradients = list(out.args[0])  # type: ignore[arg-type]
    after = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
    for i, gradient in enumerate(gradients):
        if not isinstance(gradient, Node):
            continue
        own, chain = behind_sums(gradient, whole)
        val = own.meta["val"]
        val = val.to(added_in(val.dtype, gradient.meta["val"].dtype, precision))
        after = add_placeholder(gm.graph, f"earlier_{i}", after)
        after.meta["val"] = val
        total = insert_call(own.next, aten.add.Tensor, (own, after), like=own, val=val)
        gradients[i] = _instead(own, chain, total)
    out.args = (tuple(gradients),)
    gm.recompile()
    return gm


def _instead(own: Node, chain: list[Node], total: Node) -> Node:
    """Repeat ``chain`` on the sum with the earlier gradients instead of on ``own``."""
    dtype = total.meta["val"].dtype
    if chain and is_call(chain[0], CAST) and chain[0].meta["val"].dtype == dtype:
        first, *chain = chain
        if chain:
            chain[0].update_arg(0, total)
            total.graph.erase_node(first)
    elif chain and not is_call(chain[0], CAST) and dtype != own.meta["val"].dtype:
        how, val = {"dtype": own.meta["val"].dtype}, own.meta["val"]
        chain[0].update_arg(0, insert_call(total.next, CAST, (total,), how, like=own, val=val))
    elif chain:
        chain[0].update_arg(0, total)
    return chain[-1] if chain else total

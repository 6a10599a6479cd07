"""accumulate_gradients: reduce gradients once per step, not once per micro-batch.

Consumes    a backward step graph whose gradients end in sums over ranks.
Guarantees  two graphs. BW stops before the sums: it returns this rank's own gradients. BWR, which is the last of a
            step, takes the sums of the earlier ones as further inputs (``earlier_0``, ...), adds them, and reduces.
Leaves      sums over ranks of activations, which every micro-batch needs; sums that several gradients come of (those of
            ``w1 + w2.t()``), which every micro-batch takes as well.

    g = mm(dy, x); r = all_reduce(g, "dp"); return r
        -->
    BW:   return mm(dy, x)
    BWR:  g = add(mm(dy, x), earlier_0); r = all_reduce(g, "dp"); return r
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import add_placeholder, copy_graph, insert_call, is_call, output_node, outputs, remove_dead_code
from autopar.ops.traits import PASSING, SUMS
from autopar.passes.own_gradients import own_gradients
from autopar.steps.graphs import StepGraph
from autopar.steps.value_names import earlier_sum, of

aten = torch.ops.aten


def split_accumulation(backward: StepGraph) -> tuple[StepGraph, StepGraph]:
    """(BW, BWR): see the module's docstring. The graph is left as it is."""
    own = StepGraph(_local(copy_graph(backward.graph)), backward.inputs, backward.outputs)
    last = _last(copy_graph(backward.graph))
    sums = [earlier_sum(of(name)) for name in backward.outputs if name is not None]
    return own, StepGraph(last, [*backward.inputs, *sums], backward.outputs)


def own_gradient(gradient: Node) -> Node:
    """This rank's own gradient, behind the sums over ranks that end in ``gradient`` and in nothing else: what is added
    in front of a sum is added to all that comes of it."""
    own = x = gradient
    while is_call(x, *SUMS, *PASSING) and isinstance(x.args[0], Node) and len(x.users) == 1:
        if is_call(x, *SUMS):
            own = x.args[0]
        x = x.args[0]
    return own


def _local(gm: GraphModule) -> GraphModule:
    out = output_node(gm)
    out.args = (tuple(own_gradient(g) if isinstance(g, Node) else None for g in outputs(gm)),)
    remove_dead_code(gm)
    own_gradients(gm)
    return gm


def _last(gm: GraphModule) -> GraphModule:
    out = output_node(gm)
    gradients = list(out.args[0])  # type: ignore[arg-type]
    after = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
    for i, gradient in enumerate(gradients):
        if not isinstance(gradient, Node):
            continue
        own = own_gradient(gradient)
        after = add_placeholder(gm.graph, f"earlier_{i}", after)
        after.meta["val"] = own.meta["val"]
        total = insert_call(own.next, aten.add.Tensor, (own, after), like=own, val=own.meta["val"])
        if gradient is own:
            gradients[i] = total
            continue
        user = gradient  # the sum that takes this rank's own gradient
        while user.args[0] is not own:
            user = user.args[0]  # type: ignore[assignment]
        user.update_arg(0, total)
    out.args = (tuple(gradients),)
    gm.recompile()
    return gm

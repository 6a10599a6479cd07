"""split_prologue: what a step needs to know of all its micro-batches before the first one starts.

Consumes    a typed local graph whose outermost axis is "mb", the micro-batches.
Guarantees  no conversion over "mb" is left. Values without gradient that are summed over micro-batches (the count of
            targets) are computed by a prologue graph and enter the main graph as inputs ``total_0``, ...; what
            remains (gradients of parameters, the loss) the runtime adds up. Sums of what parameters make (how many
            tokens chose each expert, in an auxiliary loss) are computed ahead as well, by a forward of every
            micro-batch; with aux_loss="micro_batch" those of one, times their number, stand for the sums of all.
Leaves      graphs without micro-batches.

    count = sum(ne(labels, -100)); n = exchange(count, "mb", P, I); loss = div(s, n)
        -->
    prologue(labels) -> count                      main(..., total_0): loss = div(s, total_0)

A model whose samples meet otherwise (batch statistics, contrastive losses) is refused: slicing the batch would change
it.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.adapters.graph_nodes import copied_node
from autopar.adapters.lazy import graph_module
from autopar.ir.conversions import conversion_of, is_conversion
from autopar.ir.graph import (
    add_placeholder,
    ancestors,
    describe,
    has_gradient,
    placeholders,
    remove_dead_code,
    run_fake,
)
from autopar.ir.meta import TYPES, extend_signature, inherit
from autopar.ir.placement import Invariant, Partial, Replicate, Shard
from autopar.ir.signature import InputSpec
from autopar.rewrite.build import Build
from autopar.rewrite.compilation import Compilation
from autopar.steps.graphs import Prologue


def split_prologue(gm: GraphModule, ctx: Compilation) -> tuple[GraphModule, Prologue | None]:
    """Remove the axis "mb" from a local graph."""
    if ctx.mesh.size("mb") == 1:
        return gm, None
    cuts: list[Node] = []
    for node in list(gm.graph.nodes):
        if not is_conversion(node) or conversion_of(node)[0] != "mb":
            continue
        _, src, dst = conversion_of(node)
        if isinstance(src, Invariant) and isinstance(dst, Replicate):
            _bypass(node)  # a parameter: the runtime adds the micro-batches' gradients
        elif isinstance(src, Partial) and isinstance(dst, Invariant) and _is_loss(node):
            _bypass(node)  # the runtime adds the micro-batches' losses
        elif isinstance(src, Partial) and isinstance(dst, Invariant) and not has_gradient(node):
            cuts.append(node)
        elif isinstance(src, Replicate) and isinstance(dst, Partial):
            _divide(node, ctx.mesh.size("mb"))
        elif isinstance(dst, Shard) and not isinstance(src, (Shard, Partial)):
            _slice_by_index(gm, node, ctx.mesh.size("mb"), dst)
        else:
            raise ValueError(_refusal(node))
    assert ctx.plan is not None
    learned = [cut for cut in cuts if _made_of_parameters(gm, [cut])]
    if ctx.plan.options.aux_loss == "micro_batch":
        for cut in learned:
            _stand_in(cut, ctx.mesh.size("mb"))
        cuts = [cut for cut in cuts if cut not in learned]
    elif learned and ctx.mesh.size("pp") > 1:
        raise ValueError(
            f"aux_loss: {describe(learned[0])} is a sum over all micro-batches of what parameters make, which a step "
            'needs before its first backward, and a stage of a pipeline has only its own; use aux_loss="micro_batch", '
            "or micro_batches=1"
        )
    prologue = _extract(gm, cuts) if cuts else None
    remove_dead_code(gm)
    gm.recompile()
    return gm, prologue


def _bypass(node: Node) -> None:
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    node.graph.erase_node(node)


def _divide(node: Node, count: int) -> None:
    """What every micro-batch computes alike becomes an addend."""
    node.target, node.args = torch.ops.aten.div.Tensor, (node.args[0], count)


def _made_of_parameters(gm: GraphModule, cuts: list[Node]) -> bool:
    """Whether weights that are trained stand behind them."""
    trained = {s.node for s in gm.meta["signature"].inputs if s.kind == "parameter" and s.requires_grad}
    return any(node.name in trained for node in ancestors(cuts))


def _stand_in(node: Node, count: int) -> None:
    """A micro-batch's own addend, times their number, instead of the sum."""
    node.target, node.args = torch.ops.aten.mul.Tensor, (node.args[0], count)


def _is_loss(node: Node) -> bool:
    """A scalar with a gradient that only leaves the graph, through other axes' conversions at most."""
    return has_gradient(node) and all(u.op == "output" or (is_conversion(u) and _is_loss(u)) for u in node.users)


def _refusal(node: Node) -> str:
    _, src, dst = conversion_of(node)
    user = next(iter(node.users))
    return (
        f"micro_batches: samples of different micro-batches meet at {describe(user)} (its operand goes from {src} "
        f"to {dst}), so cutting the batch would change the result; use micro_batches=1"
    )


def _extract(gm: GraphModule, cuts: list[Node]) -> Prologue:
    """Move the ancestors of the cut values into a graph of their own."""
    order = list(gm.graph.nodes)
    needed = ancestors(cuts)
    for cut in cuts:
        if not ancestors([cut]).isdisjoint({*cuts} - {cut}):
            raise ValueError(_refusal(cut))  # a sum of what another sum decides
    graph, copies = Graph(), dict[Node, Node]()
    inputs = [n for n in order if n in needed and n.op == "placeholder"]
    for node in order:
        if node in needed and node not in cuts:
            copies[node] = copied_node(graph, node, copies.__getitem__)
    graph.output(tuple(copies[c.args[0]] for c in cuts))  # type: ignore[index]
    after = placeholders(gm)[-1]
    totals = []
    for i, cut in enumerate(cuts):
        total = add_placeholder(gm.graph, f"total_{i}", after)
        total.meta = {"val": cut.meta["val"], "has_gradient": False}
        inherit(total, cut, TYPES)
        cut.replace_all_uses_with(total)
        gm.graph.erase_node(cut)
        totals.append(total.name)
        after = total
    extend_signature(gm, [InputSpec(name, "total", name) for name in totals])
    return Prologue(graph_module(graph, "Prologue"), [n.name for n in inputs], totals)


def _slice_by_index(gm: GraphModule, node: Node, count: int, dst: Shard) -> None:
    """A whole value of which each micro-batch takes a piece: select it by the number of the micro-batch, an input."""
    x = node.args[0]
    assert isinstance(x, Node)
    index = _micro_batch_input(gm)
    blocks = dst.blocks or (x.meta["val"].shape[dst.dim],)
    assert min(blocks) > 0, f"micro-batches are dealt in order, found {dst}"
    aten, call = torch.ops.aten, Build(node)
    device = x.meta["val"].device
    starts, rows = 0, []
    for block in blocks:
        size = block // count
        base = call(aten.arange.start, starts, starts + size, device=device)
        rows.append(call(aten.add.Tensor, call(aten.mul.Scalar, index, size), base))
        starts += block
    chosen = rows[0] if len(rows) == 1 else call(aten.cat.default, rows)
    picked = call(aten.index_select.default, x, dst.dim, chosen)
    inherit(picked, node, TYPES)
    node.replace_all_uses_with(picked)
    gm.graph.erase_node(node)


def _micro_batch_input(gm: GraphModule) -> Node:
    """The placeholder that says which micro-batch runs: an int64 scalar tensor."""
    for node in placeholders(gm):
        if node.name == "micro_batch":
            return node
    node = add_placeholder(gm.graph, "micro_batch", placeholders(gm)[-1])
    val = run_fake(gm.graph, torch.zeros, ((),), {"dtype": torch.int64})
    node.meta = {"val": val, "has_gradient": False, "global_shape": ()}
    extend_signature(gm, [InputSpec("micro_batch", "micro_batch", "micro_batch")])
    return node

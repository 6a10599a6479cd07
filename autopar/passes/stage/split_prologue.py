"""split_prologue: statistics over all microbatches that a step needs before the first one starts.

Consumes    a local graph with placements whose outermost axis is "mb", the microbatches.
Guarantees  no conversion over "mb" is left. Values without gradient that all microbatches share are totals, inputs
            ``total_0``, ... of the main graph: those that are summed (the count of targets), and those that are
            gathered (the experts of all tokens, whose capacity is counted globally), as a sum of zero-padded shards.
            With replicas, whose microbatches are among these, some may be absent: their number is an input, and means
            are divided by it.
            A prologue graph computes totals of inputs. Totals that depend on weights are computed by a pre-pass
            without gradients (`split_statistics`); with aux_loss_scope="microbatch" the sums of one microbatch, times
            their number, replace those of all. The runtime accumulates the rest (gradients of parameters, the loss).
Leaves      graphs without microbatches.

    count = sum(ne(labels, -100)); n = exchange(count, "mb", P, I); loss = div(s, n)
        -->
    prologue(labels) -> count                      main(..., total_0): loss = div(s, total_0)

A model whose samples interact otherwise (batch statistics, contrastive losses) is refused: splitting the batch would
change the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from autopar.ir.conversions import conversion_of, is_conversion
from autopar.ir.graph import (
    add_placeholder,
    ancestors,
    described_at,
    extracted,
    has_gradient,
    insert_call,
    placeholders,
    remove_dead_code,
    run_fake,
)
from autopar.ir.meta import TYPES, extend_signature, inherit
from autopar.ir.placement import Invariant, Partial, Replicate, Shard
from autopar.ir.signature import PRESENT, InputSpec
from autopar.rewrite.build import Build
from autopar.rewrite.compilation import Compilation
from autopar.steps.graphs import Prologue

aten = torch.ops.aten


def split_prologue(gm: GraphModule, ctx: Compilation) -> tuple[GraphModule, Prologue | None, GraphModule | None]:
    """Remove the axis "mb" from a local graph. Returns it, its prologue, and the graph of the pre-pass: the addends of
    a microbatch to the totals that depend on weights, of which one may depend on another; their names are in its
    ``meta["results"]``."""
    count = ctx.mesh.size("mb")
    if count == 1:
        return gm, None, None
    assert ctx.plan is not None
    cuts: list[Node] = []
    replicas = ctx.plan.options.replicas > 1
    for node in list(gm.graph.nodes):
        if replicas and node.meta.get("of_microbatches"):
            _divide_by(node, _number_present(gm), count)
        if not is_conversion(node) or conversion_of(node)[0] != "mb":
            continue
        _, src, dst = conversion_of(node)
        if isinstance(src, Invariant) and isinstance(dst, Replicate):
            _bypass(node)  # a parameter: the runtime adds the microbatches' gradients
        elif isinstance(src, Partial) and isinstance(dst, Invariant) and _is_loss(node):
            _bypass(node)  # the runtime adds the microbatches' losses
        elif isinstance(src, Partial) and isinstance(dst, Invariant) and not has_gradient(node):
            cuts.append(node)
        elif isinstance(src, Replicate) and isinstance(dst, Partial):
            node.target = aten.div.Tensor  # all compute the same: an addend once divided
            node.args = node.args[0], _number_present(gm) if replicas else count
        elif isinstance(dst, Shard) and not isinstance(src, (Shard, Partial)):
            _slice_by_index(gm, node, count, dst)
        elif isinstance(src, Shard) and not isinstance(dst, Shard) and not has_gradient(node):
            _place_by_index(gm, node, count, src)
            cuts.append(node)
        else:
            raise ValueError(_refusal(node))
    learned = {cut for cut in cuts if _made_of_parameters(gm, [cut])}
    if ctx.plan.options.aux_loss_scope == "microbatch":
        for cut in [cut for cut in learned if isinstance(conversion_of(cut)[1], Partial)]:
            # its own addend instead of the sum
            cut.target, cut.args = aten.mul.Tensor, (cut.args[0], _number_present(gm) if replicas else count)
            cuts.remove(cut)
        learned = {cut for cut in cuts if _made_of_parameters(gm, [cut])}
    if replicas and learned:
        raise ValueError(
            f"replicas: {described_at(next(iter(learned)))} is a statistic of all microbatches and depends on weights, "
            'which replicas do not exchange; use aux_loss_scope="microbatch"'
        )
    _refuse_chains([cut for cut in cuts if cut not in learned])
    addends = dict(_as_total(gm, cut, i) for i, cut in enumerate(cuts))
    later = [total for total, cut in zip(addends, cuts, strict=True) if cut in learned]
    prologue = _extract(gm, {total: x for total, x in addends.items() if total not in later}, "Prologue")
    pre_pass = _extract(gm, {total: addends[total] for total in later}, "PrePass")
    remove_dead_code(gm)
    gm.recompile()
    if prologue is None:
        return gm, None, pre_pass
    inputs = [n.name for n in placeholders(prologue)]
    return gm, Prologue(prologue, inputs, prologue.meta["results"]), pre_pass


def _divide_by(scaled: Node, present: Node, count: int) -> None:
    """A mean over the microbatches that are present, instead of ``count``."""
    x, factor = scaled.args
    assert isinstance(factor, float), "see lower_to_local"
    scaled.args = x, factor * count
    mean = insert_call(scaled.next, aten.div.Tensor, (scaled, present), like=scaled, val=scaled.meta["val"])
    inherit(mean, scaled, TYPES)
    scaled.replace_all_uses_with(mean, delete_user_cb=lambda user: user is not mean)


def _bypass(node: Node) -> None:
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    node.graph.erase_node(node)


def _made_of_parameters(gm: GraphModule, cuts: list[Node]) -> bool:
    """Whether any of the nodes depends on weights that are trained."""
    trained = {s.node for s in gm.meta["signature"].inputs if s.kind == "parameter" and s.requires_grad}
    return any(node.name in trained for node in ancestors(cuts))


def _is_loss(node: Node) -> bool:
    """Whether it is a scalar with a gradient that only leaves the graph, at most through other axes' conversions."""
    return has_gradient(node) and all(u.op == "output" or (is_conversion(u) and _is_loss(u)) for u in node.users)


def _refusal(node: Node) -> str:
    _, src, dst = conversion_of(node)
    user = next(iter(node.users))
    return (
        f"microbatches: samples of different microbatches meet at {described_at(user)} (its operand goes from {src} "
        f"to {dst}), so splitting the batch would change the result; use microbatches=1 and one replica"
    )


def _refuse_chains(cuts: list[Node]) -> None:
    for cut in cuts:
        if not ancestors([cut]).isdisjoint({*cuts} - {cut}):
            raise ValueError(_refusal(cut))  # a sum of values that depend on another sum


def _as_total(gm: GraphModule, cut: Node, i: int) -> tuple[Node, Node]:
    """An input that replaces a converted value, and the addend of each microbatch."""
    addend, total = cut.args[0], add_placeholder(gm.graph, f"total_{i}", placeholders(gm)[-1])
    assert isinstance(addend, Node)
    total.meta = {"val": cut.meta["val"], "has_gradient": False}
    inherit(total, cut, TYPES)
    cut.replace_all_uses_with(total)
    gm.graph.erase_node(cut)
    extend_signature(gm, [InputSpec(total.name, "total", total.name)])
    return total, addend


def _extract(gm: GraphModule, addends: Mapping[Node, Node], title: str) -> GraphModule | None:
    """A graph that computes a microbatch's addends to some totals."""
    if not addends:
        return None
    made = extracted(gm, [*addends.values()], title)
    made.meta["signature"], made.meta["results"] = gm.meta["signature"], [total.name for total in addends]
    return made


def _slice_by_index(gm: GraphModule, node: Node, count: int, dst: Shard) -> None:
    """Each microbatch takes its shard of a replicated value: select it by the index of the microbatch, an input."""
    x = node.args[0]
    assert isinstance(x, Node)
    chosen = _own_entries(gm, node, count, dst.blocks or (x.meta["val"].shape[dst.dim],), x)
    picked = Build(node)(aten.index_select.default, x, dst.dim, chosen)
    inherit(picked, node, TYPES)
    node.replace_all_uses_with(picked)
    gm.graph.erase_node(node)


def _place_by_index(gm: GraphModule, node: Node, count: int, src: Shard) -> None:
    """Pad a microbatch's shard with zeros to the full size, so that it is an addend."""
    x = node.args[0]
    assert isinstance(x, Node)
    shape, call = list(node.meta["val"].shape), Build(node)
    chosen = _own_entries(gm, node, count, src.blocks or (shape[src.dim],), x)
    zeros = call(aten.new_zeros.default, x, shape)
    node.args = (call(aten.index_copy.default, zeros, src.dim, chosen, x), *node.args[1:])


def _own_entries(gm: GraphModule, node: Node, count: int, blocks: Sequence[int], like: Node) -> Node:
    """Which entries of a dim belong to a microbatch: an equal share of each block."""
    assert min(blocks) > 0, f"microbatches are dealt in order, found {blocks}"
    index, call, device = _microbatch_input(gm), Build(node), like.meta["val"].device
    starts, rows = 0, []
    for block in blocks:
        size = block // count
        base = call(aten.arange.start, starts, starts + size, device=device)
        rows.append(call(aten.add.Tensor, call(aten.mul.Scalar, index, size), base))
        starts += block
    return rows[0] if len(rows) == 1 else call(aten.cat.default, rows)


def _microbatch_input(gm: GraphModule) -> Node:
    """The placeholder for the index of the running microbatch: an int64 scalar tensor."""
    return _scalar_input(gm, "microbatch", torch.int64)


def _number_present(gm: GraphModule) -> Node:
    """The placeholder for the number of microbatches of a step, of which some may be absent: a float scalar tensor."""
    return _scalar_input(gm, PRESENT, torch.float32)


def _scalar_input(gm: GraphModule, kind: str, dtype: torch.dtype) -> Node:
    for node in placeholders(gm):
        if node.name == kind:
            return node
    node = add_placeholder(gm.graph, kind, placeholders(gm)[-1])
    val = run_fake(gm.graph, torch.zeros, ((),), {"dtype": dtype})
    node.meta = {"val": val, "has_gradient": False, "global_shape": ()}
    extend_signature(gm, [InputSpec(kind, kind, kind)])
    return node

"""slice_early: compute only the needed shard of values that ranks hold alike.

Consumes    a global graph with placements.
Guarantees  a value (a rotary table, positions, a mask, shifted labels, embeddings of positions) of which only one shard
            is used is computed sharded, from slices as far up as the rules allow; no op computes more than before.
Leaves      shapes, which stay global; Invariant values with a gradient, as their slices exchange it; token slices and
            microbatches.

    angle = mul(positions, frequency)    -->    positions_s = convert(positions, "cp", I, S(0))
    cos = cos(angle)                            angle = mul(positions_s, frequency)          # cp: S(0)
    cos_s = convert(cos, "cp", I, S(0))         cos = cos(angle)                             # cp: S(0)
    y = mul(x, cos_s)                           y = mul(x, cos)

A slice is not moved above an input, an op that needs its whole operand (a cumulative sum of floats; integers, such as
positions counted in a mask, are scanned by shards; rows that fill a mask), an op without tensor
operands whose elements differ (arange), or a value with a user that needs all of it: slicing is cheaper than computing
a shard twice. What is filled with one value (new_empty) is made as large as it is needed, also for a microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from autopar.ir.conversions import conversion_of, convert, is_conversion
from autopar.ir.graph import getitem_index, has_gradient, insert_call, placement, tensor_operands
from autopar.ir.mesh import IN_TIME
from autopar.ir.placement import Invariant, Placement, Replicate, Shard
from autopar.ops.traits import FILLED, IN_ORDER_OF_MASK
from autopar.rewrite.checks import PlacementError, check_types
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass
from autopar.rules import RuleError, has_rule, rule_of, set_results, type_of
from autopar.rules.along_tokens import rows_sent


class SliceEarly(Pass):
    """Moves slices towards the inputs, axis by axis."""

    name = "slice_early"
    requires = ("placements",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        axes = [a for a in ctx.mesh.cut_order if a != "sl"]
        while any([_Moves(gm, ctx, axis).run() for axis in axes]):  # a slice of one axis may wait for that of another
            pass
        gm.recompile()
        return gm


class _Moves:
    """The moves on one axis. ``slices``: the slices on this axis, by operand and shard."""

    def __init__(self, gm: GraphModule, ctx: Compilation, axis: str) -> None:
        self.gm, self.ctx, self.axis = gm, ctx, axis
        self.replicate_ops = ctx.plan.options.replicate_ops if ctx.plan is not None else ()
        self.slices: dict[tuple[Node, Placement], Node] = {}
        for node in gm.graph.nodes:
            if self._is_slice(node):
                self.slices[node.args[0], conversion_of(node)[2]] = node

    def _is_slice(self, node: Node) -> bool:
        if not is_conversion(node):
            return False
        axis, src, dst = conversion_of(node)
        return axis == self.axis and _may_slice(node, src) and isinstance(dst, Shard)

    def run(self) -> bool:
        """Whether a slice was moved."""
        users_first = reversed(list(self.gm.graph.nodes))  # they move their slices up
        return any([self._visit(n) for n in users_first if self.axis not in IN_TIME or n.target in FILLED])

    def _visit(self, node: Node) -> bool:
        """Shard a value instead of slicing it, if a single slice is all that is used of it and its rule allows that."""
        uses = list(node.users)
        if not uses or not all(map(self._is_slice, uses)) or not _is_computed(node):
            return False
        placed = uses[0].meta["placements"]
        if any(use.meta["placements"] != placed for use in uses) or not self._cut(node, placed):
            return False
        for use in uses:
            use.replace_all_uses_with(node)
            self.slices.pop((node, conversion_of(use)[2]), None)
            self.gm.graph.erase_node(use)
        return True

    def _cut(self, node: Node, placed: Mapping[str, Placement]) -> bool:
        """Slice the operands of an op and give it these placements. False, changing nothing, if that is impossible."""
        before = node.args, node.kwargs, node.meta.get("placements", {})
        made: list[tuple[Node, Shard]] = []
        try:
            for x, shard in self._operand_cuts(node, placed[self.axis]).items():
                node.replace_input_with(x, self._slice(x, shard, node, made))
            node.meta["placements"] = dict(placed)
            check_types(self.gm, self.ctx, [*(self.slices[key] for key in made), node])
        except (RuleError, PlacementError, ValueError):
            node.args, node.kwargs, node.meta["placements"] = before
            for key in made:
                self.gm.graph.erase_node(self.slices.pop(key))
            return False
        return True

    def _operand_cuts(self, node: Node, result: Placement) -> dict[Node, Shard]:
        """The operands that are sharded with the result, and how. Raises RuleError if the rule has no such sharding, or
        if it needs a placement that slicing does not give."""
        assert isinstance(result, Shard)
        if node.target in IN_ORDER_OF_MASK:
            raise RuleError("rows of a shard follow those of the shards before it, unless a check at run time holds")
        if rows_sent(node, self.axis) and node.meta["val"].is_floating_point():
            raise RuleError("a sum over ranks rounds otherwise than the whole")
        rule = rule_of(node, self.axis, self.ctx.mesh, whole=self.replicate_ops)
        cut = rule.completed(rule.cut_of(rule.results[0], result, self.ctx.mesh.pieces(self.axis)))
        found: dict[Node, Shard] = {}
        operands = list(zip(tensor_operands(node), rule.required(cut), strict=True))
        for x, need in operands:
            if isinstance(need, Shard):
                if not _may_slice(x, placement(x, self.axis)):
                    raise RuleError(f"slicing {x.name} would exchange its gradient")
                found[x] = need
        if any(x in found and need != found[x] for x, need in operands):
            raise RuleError("an operand is needed in two ways")
        return found

    def _slice(self, x: Node, shard: Shard, before: Node, made: list[tuple[Node, Shard]]) -> Node:
        """The slice of an operand: created once, right before its first use, and appended to ``made``."""
        found = self.slices.get((x, shard))
        if found is not None:
            if before < found:
                before.prepend(found)
            return found
        args = (x, self.axis, str(placement(x, self.axis)), str(shard))
        new = insert_call(before, convert, args, name=f"{x.name}_s")
        self.slices[x, shard] = new
        made.append((x, shard))
        for axis in self.ctx.mesh.cut_order:
            set_results(new, axis, [shard] if axis == self.axis else type_of(new, axis, self.ctx.mesh))
        return new


def _may_slice(x: Node, have: Placement) -> bool:
    """Whether a slice of a value is local, and its derivative too: of a Replicate value, each rank's own addend."""
    return isinstance(have, Replicate) or (isinstance(have, Invariant) and not has_gradient(x))


def _is_computed(node: Node) -> bool:
    """Whether it is an op on tensors, or one that fills a tensor, with a rule and one result, and not a conversion of
    another axis."""
    if node.op != "call_function" or is_conversion(node) or getitem_index(node) is not None:
        return False
    if node.target in FILLED and any(map(_is_routed, tensor_operands(node))):
        return False  # a size that may be theirs is read at run time (`routed_sizes`)
    made = bool(tensor_operands(node)) or node.target in FILLED
    return made and has_rule(node) and isinstance(node.meta["val"], torch.Tensor)


def _is_routed(x: Node) -> bool:
    return any(isinstance(p, Shard) and p.routed for p in x.meta.get("placements", {}).values())

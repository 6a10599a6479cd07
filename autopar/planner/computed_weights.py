"""Parameters behind weights of experts that the forward computes, such as by a stack of each expert's own.

    w = stack([w0, w1, w2, w3])            # [E, F, H]; a rank of the axis uses w[its experts]
    out = grouped_mm(rows, w, offsets)

Where sharding experts shards parameters (an element-wise function of a stored [E, F, H]), they are sharded so. A stack
adds the dim of experts, so that no shard of a parameter is a whole expert: another dim of all of them is sharded, and
an all-to-all per step turns a part of every expert into a few whole ones (the gradients come back the same way). Each
rank stores 1/n of the parameters and of their optimizer states, as with stored [E, F, H].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import GraphModule, Node

from autopar.ir.expert_layers import ExpertPlan, dispatches, expert_weights
from autopar.ir.graph import getitem_index, global_shape, tensor_operands
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard, local_shape, shard_of_size
from autopar.planner.factor_propagation import Analysis
from autopar.rules import RuleError, has_rule


def sharded_sources(
    gm: GraphModule,
    mesh: Mesh,
    names: Mapping[Node, str],
    plans: Mapping[str, ExpertPlan],
    over_tp: Mapping[Node, Shard | None],
) -> dict[Node, dict[Node, Shard]]:
    """Computed weight of experts -> how the parameters behind it are stored on the axis of its layer. ``over_tp``: how
    tp, which shards before that axis, shards parameters."""
    known: dict[Node, Shard] = {}
    found: dict[Node, dict[Node, Shard]] = {}
    for dispatch in dispatches(gm):
        chosen = plans.get(dispatch.name)
        if chosen is None or chosen.axis == "tp":  # tensor parallelism shards them by itself
            continue
        analysis = Analysis(gm, mesh, chosen.axis)
        for weight in expert_weights(dispatch):
            if weight.op != "placeholder" and (sources := _Sources(analysis, names, known, over_tp).of(weight)):
                found[weight] = sources
                known |= sources
    return found


def spread(axis: str) -> str:
    """The reason for such a placement."""
    return f"weights of experts are computed from it: each rank of {axis} stores a part"


class _Sources:
    """``known``: shards of parameters that other weights have decided."""

    def __init__(
        self,
        analysis: Analysis,
        names: Mapping[Node, str],
        known: Mapping[Node, Shard],
        over_tp: Mapping[Node, Shard | None],
    ) -> None:
        self.analysis, self.names, self.known, self.over_tp = analysis, names, known, over_tp

    def of(self, weight: Node) -> dict[Node, Shard]:
        """The shards of the first dim of a weight that shards parameters: experts, else another that divides, else
        the largest, padded."""
        ranks, shape = self.analysis.ranks, global_shape(weight)
        padded = [d for d, size in enumerate(shape) if size % ranks]
        even = [d for d in range(len(shape)) if d not in padded]
        for dim in (0, *even, *sorted(padded, key=lambda d: -shape[d])):
            shard = shard_of_size(dim, shape[dim], ranks)
            if shape[dim] >= ranks and (found := self._behind(weight, shard)):
                return found
        return {}

    def _behind(self, weight: Node, shard: Shard) -> dict[Node, Shard]:
        """Of the parameters that a sharded value is computed from by its own shard; empty if one cannot be sharded."""
        facts, pending = {weight: shard}, [weight]
        while pending:
            x = pending.pop()
            if x.op == "placeholder":
                continue
            try:
                operands = self._operands(x, facts[x])
            except RuleError:
                return {}
            for operand, own in operands.items():
                if operand not in self.analysis.from_parameter or operand in self.analysis.from_input:
                    continue  # a slice of it is free
                if facts.setdefault(operand, own) != own or self.known.get(operand, own) != own:
                    return {}
                pending.append(operand)
        found = {x: own for x, own in facts.items() if x in self.names}
        return found if all(self._divides(x, own) for x, own in found.items()) else {}

    def _divides(self, x: Node, own: Shard) -> bool:
        """Whether what tp leaves of a dim divides, too."""
        other = self.over_tp.get(x)
        if other is None or other.dim != own.dim:
            return True
        size = local_shape(global_shape(x), other, self.analysis.mesh.size("tp"))[own.dim]
        return not (own.units or own.blocks or other.units or other.blocks or size % self.analysis.ranks)

    def _operands(self, x: Node, shard: Shard) -> dict[Node, Shard]:
        """How operands of the call that computes a value are sharded if it is so, but for those that it needs whole."""
        index = getitem_index(x)
        call: Any = x if index is None else x.args[0]
        if not has_rule(call):
            raise RuleError(f"no rule for {call.target}")
        rule = self.analysis.rule(call)
        cut = rule.completed(rule.cut_of(rule.results[index or 0], shard, self.analysis.ranks))
        shards = (None if dims is None else rule.shard_of(dims, cut) for dims in rule.operands)
        return {node: own for node, own in zip(tensor_operands(call), shards, strict=True) if own is not None}

"""Layers of experts between products with one-hot tensors, as GShard writes them, found by dataflow.

    rows = einsum("sec,sm->ecm", dispatch, x)          # a product of activations that adds the dim of experts: dispatch
    made = bmm(relu(bmm(rows, up)), down)              # products with one weight per expert keep it
    y = einsum("sec,ecm->sm", combine, made)           # a product of activations that contracts it: combine

Sharding that dim of the weights is all that expert parallelism needs here. The rows of a rank's own tokens are partial
sums of those of all tokens, and are reduce-scattered by expert; what experts made is gathered for the combine. (GShard,
arXiv:2006.16668, 3.2, has all-to-alls in their place: its capacity is one of each group of tokens.)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import getitem_index, global_shape, tensor_operands
from autopar.ir.mesh import Mesh
from autopar.ir.placement import shard_of_size
from autopar.ops.traits import PRODUCTS
from autopar.planner.factor_propagation import Analysis
from autopar.rules import RuleError, has_rule

_PRODUCTS = (*PRODUCTS, torch.ops.aten.einsum.default)


def one_hot_experts(gm: GraphModule, mesh: Mesh, names: Mapping[Node, str]) -> dict[str, int]:
    """Name of each parameter with one entry per expert along dim 0, in a layer between a dispatch and a combine that
    are products -> its number of experts."""
    analysis = Analysis(gm, mesh, "ep")
    found: dict[Node, int] = {}
    for x in names:
        shape = global_shape(x)
        if len(shape) > 2 and shape[0] > 1 and x not in found:
            found |= dict.fromkeys(_Layer(analysis, x).parameters(), shape[0])
    return {names[x]: experts for x, experts in found.items()}


class _Layer:
    """All that is sharded with the first dim of a weight, up to the products that add and contract that dim."""

    def __init__(self, analysis: Analysis, weight: Node) -> None:
        experts = global_shape(weight)[0]
        self.analysis = analysis
        self.facts = {weight: shard_of_size(0, experts, analysis.ranks)}
        self.pending, self.dispatched, self.combined = [weight], False, False

    def parameters(self) -> list[Node]:
        """Those of the layer; none if the dim ends anywhere else."""
        while self.pending:
            x = self.pending.pop()
            calls = [user for user in x.users if user.op != "output"]
            for call in calls if x.op == "placeholder" else [x, *calls]:
                if not self._spread(x, call):
                    return []
        ended = self.dispatched and self.combined
        return [x for x in self.facts if x in self.analysis.parameters] if ended else []

    def _spread(self, x: Node, call: Node) -> bool:
        """To the operands and the result of a call that has ``x``; whether the dim may be sharded there."""
        if not has_rule(call) or getitem_index(call) is not None:
            return False
        operands, rule = tensor_operands(call), self.analysis.rule(call)
        nodes, dims = [*operands, call], [*rule.operands, rule.results[0]]
        try:
            own = dims[nodes.index(x)]
            if own is None:
                return True  # only its shape matters
            cut = rule.completed(rule.cut_of(own, self.facts[x], self.analysis.ranks))
            shards = [None if d is None else rule.shard_of(d, cut) for d in dims]
        except RuleError:
            return False
        if call.target in _PRODUCTS and self.analysis.from_input.issuperset(operands):
            if x is call and sum(s is not None for s in shards) == 2:
                self.dispatched = True
                return True
            if shards[-1] is None:
                self.combined = True
                return True
        if shards[-1] is None:
            return False  # a weight or a sum contracts it
        met = {n: s for n, s in zip(nodes, shards, strict=True) if s is not None and n in self.analysis.from_parameter}
        self.pending += met.keys() - self.facts.keys()
        self.facts = met | self.facts
        return all(self.facts[node] == shard for node, shard in met.items())

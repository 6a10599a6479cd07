"""Layers of experts in a graph, found by dataflow, and how one is cut.

rows, order, offsets = moe_dispatch(x, expert, E)      products with weights of experts take the offsets, the
hidden = grouped_mm(rows, w, offsets)                  combine takes the order
out = moe_combine(hidden, order, weights)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

import autopar.ops.grouped_experts  # noqa: F401  (registers the operators)
from autopar.ir.conversions import is_conversion, uncast
from autopar.ir.graph import arguments, calls_of, global_shape, is_call
from autopar.ir.placement import Shard
from autopar.token_dispatchers import TOKEN_DISPATCHERS

ours = torch.ops.autopar
aten = torch.ops.aten
_KEPT_ORDER = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int,
)  # fmt: skip
_GROUPED = {ours.grouped_mm.default: "weight", ours.grouped_bias.default: "bias"}


@dataclass(frozen=True)
class ExpertPlan:
    """How one layer's experts are cut: over which axis, how tokens get to them, and why. ``per_node``: how many ranks
    of the axis that follow each other are one node; 0 where there is one."""

    axis: str
    token_dispatcher: str
    reason: str = ""
    per_node: int = 0

    @property
    def sends_tokens(self) -> bool:
        """Whether tokens stay sharded, and copies of them go to the ranks of their experts."""
        return not TOKEN_DISPATCHERS[self.token_dispatcher].gathers


def dispatches(gm: GraphModule) -> list[Node]:
    """Where tokens are sorted by expert, one for each layer."""
    return calls_of(gm.graph, ours.moe_dispatch.default)


def pairs_per_expert(dispatch: Node, factor: float) -> int:
    """How many pairs of a token and an expert each expert takes: ``factor`` times an even share of those of the whole
    batch, rounded up. Raises ValueError below one."""
    tokens, top = global_shape(arguments(dispatch)["expert"])
    experts = int(arguments(dispatch)["num_experts"])
    share = factor * tokens * top / experts
    if share < 1:
        raise ValueError(
            f"capacity_factor: an expert must take a token at least, found {factor} times the even share of {tokens} "
            f"tokens with {top} of {experts} experts each, which is {share:.3g}; use "
            f"{experts / (tokens * top):.3g} or more"
        )
    return math.ceil(share)


def layer_of_dispatch(dispatch: Node) -> list[Node]:
    """The calls that ask which rows are whose: products with and biases of experts, and combines."""
    entries = [user for user in dispatch.users if is_call(user, operator.getitem) and user.args[1] in (1, 2)]
    wanted = (*_GROUPED, ours.moe_combine.default)
    return list(dict.fromkeys(user for entry in entries for user in entry.users if is_call(user, *wanted)))


def expert_weights(dispatch: Node) -> list[Node]:
    """The layer's weights and biases, one entry per expert along dim 0: placeholders, also those of which a weight is
    a view that keeps experts in one piece each (dbrx stores [E*F, H]); else what makes them in the forward."""
    grouped = [node for node in layer_of_dispatch(dispatch) if node.target in _GROUPED]
    experts = int(arguments(dispatch)["num_experts"])
    taken = (_stored(arguments(node)[_GROUPED[node.target]], experts) for node in grouped)  # type: ignore[index]
    return list(dict.fromkeys(taken))


def _stored(weight: Node, experts: int) -> Node:
    """What a weight is cast from and a view of. Equal parts of dim 0 are the same parts of both: views keep the order
    of entries, and transposed are other dims only."""
    x = uncast(weight)
    while is_call(x, *_KEPT_ORDER):
        before = uncast(x.args[0])  # type: ignore[arg-type]
        if global_shape(before)[0] % experts or not _first_stays(x):
            return x
        x = before
    return x


def _first_stays(x: Node) -> bool:
    """Whether a view, or a permutation of dims, leaves dim 0 in front."""
    if is_call(x, aten.permute.default):
        return int(x.args[1][0]) % x.meta["val"].dim() == 0  # type: ignore[index, arg-type]
    if is_call(x, aten.transpose.int):
        return all(int(dim) % x.meta["val"].dim() for dim in x.args[1:3])  # type: ignore[arg-type]
    return True


def axis_of_experts(plans: Mapping[str, ExpertPlan]) -> str:
    """The axis over which experts are cut, the same for all layers; "": none."""
    return next((chosen.axis for chosen in plans.values()), "")


def mark_experts(gm: GraphModule, plans: Mapping[str, ExpertPlan], axis: str) -> None:
    """Note on the calls of each layer whose experts are cut on an axis that they are: their rules ask."""
    for node in dispatches(gm):
        chosen = plans.get(node.name)
        if chosen is not None and chosen.axis == axis:
            for x in (node, *layer_of_dispatch(node)):
                x.meta["experts"] = chosen


def dispatch_of(user: Node) -> Node:
    """The dispatch that made the order which a call takes, such as a combine."""
    node: Node = arguments(user)["order"]
    while is_call(node, operator.getitem) or is_conversion(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def blocks_of_tokens(node: Node, axis: str) -> tuple[int, ...]:
    """The blocks in which the tokens of a dispatch, or of that of a combine, are cut on an axis; (): in one."""
    dispatch = dispatch_of(node) if "order" in arguments(node) else node
    placed = arguments(dispatch)["x"].meta.get("placements", {}).get(axis)
    return placed.blocks if isinstance(placed, Shard) and placed.dim == 0 else ()

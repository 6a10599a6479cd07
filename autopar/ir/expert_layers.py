"""Layers of experts in a graph, found by dataflow, and how each is sharded.

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
from autopar.ir.graph import ancestors, arguments, calls_of, global_shape, is_call, reach
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
    """How one layer's experts are sharded: on which axis, with which token dispatcher, and why. ``per_node``: how many
    consecutive ranks of the axis share a node; 0 if there is one node."""

    axis: str
    token_dispatcher: str
    reason: str = ""
    per_node: int = 0

    @property
    def sends_tokens(self) -> bool:
        """Whether tokens stay sharded, and copies of them go to the ranks of their experts."""
        return not TOKEN_DISPATCHERS[self.token_dispatcher].gathers


def dispatches(gm: GraphModule) -> list[Node]:
    """The calls that sort tokens by expert, one for each layer."""
    return calls_of(gm.graph, ours.moe_dispatch.default)


def pairs_per_expert(dispatch: Node, factor: float) -> int:
    """How many pairs of a token and an expert each expert takes: ``factor`` times an even share of those of the global
    batch, rounded up. Raises ValueError below one."""
    tokens, top = global_shape(arguments(dispatch)["expert"])
    experts = int(arguments(dispatch)["num_experts"])
    share = factor * tokens * top / experts
    if share < 1:
        raise ValueError(
            f"capacity_factor: an expert must take at least one token, found {factor} times the even share of {tokens} "
            f"tokens with {top} of {experts} experts each, which is {share:.3g}; use "
            f"{experts / (tokens * top):.3g} or more"
        )
    return math.ceil(share)


def layer_of_dispatch(dispatch: Node) -> list[Node]:
    """The calls that use the dispatch's rows or order: products with and biases of experts, and combines."""
    entries = [user for user in dispatch.users if is_call(user, operator.getitem) and user.args[1] in (1, 2)]
    wanted = (*_GROUPED, ours.moe_combine.default)
    return list(dict.fromkeys(user for entry in entries for user in entry.users if is_call(user, *wanted)))


def expert_weights(dispatch: Node) -> list[Node]:
    """The layer's weights and biases, one entry per expert along dim 0: placeholders, also those of which a weight is
    a view that keeps each expert contiguous (dbrx stores [E*F, H]); else the nodes that compute them in the forward."""
    grouped = [node for node in layer_of_dispatch(dispatch) if node.target in _GROUPED]
    experts = int(arguments(dispatch)["num_experts"])
    taken = (_stored(arguments(node)[_GROUPED[node.target]], experts) for node in grouped)  # type: ignore[index]
    return list(dict.fromkeys(taken))


def _stored(weight: Node, experts: int) -> Node:
    """The placeholder that a weight is a cast or a view of. Equal slices of dim 0 are the same entries of both: views
    keep the order of entries, and only other dims are transposed."""
    x = uncast(weight)
    while is_call(x, *_KEPT_ORDER):
        before = uncast(x.args[0])  # type: ignore[arg-type]
        if global_shape(before)[0] % experts or not _first_stays(x):
            return x
        x = before
    return x


def _first_stays(x: Node) -> bool:
    """Whether a view, or a permutation of dims, leaves dim 0 first."""
    if is_call(x, aten.permute.default):
        return int(x.args[1][0]) % x.meta["val"].dim() == 0  # type: ignore[index, arg-type]
    if is_call(x, aten.transpose.int):
        return all(int(dim) % x.meta["val"].dim() for dim in x.args[1:3])  # type: ignore[arg-type]
    return True


def axis_of_experts(plans: Mapping[str, ExpertPlan]) -> str:
    """The axis that experts are sharded on, the same for all layers; "": none."""
    return next((chosen.axis for chosen in plans.values()), "")


def mark_experts(gm: GraphModule, plans: Mapping[str, ExpertPlan], axis: str) -> None:
    """Annotate the calls of each layer whose experts are sharded on an axis, for their rules."""
    for node in dispatches(gm):
        chosen = plans.get(node.name)
        if chosen is not None and chosen.axis == axis:
            for x in (node, *layer_of_dispatch(node)):
                x.meta["experts"] = chosen


def dispatch_of(user: Node) -> Node:
    """The dispatch that computed the order which a call uses, such as a combine."""
    node: Node = arguments(user)["order"]
    while is_call(node, operator.getitem) or is_conversion(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def part_of_experts(combine: Node) -> set[Node]:
    """The calls from a combine's dispatch to the combine."""
    return set(reach([dispatch_of(combine)], lambda node: node.users)) & ancestors([combine])


def blocks_of_tokens(node: Node, axis: str) -> tuple[int, ...]:
    """The blocks in which the tokens of a dispatch, or of that of a combine, are sharded on an axis; (): in one."""
    dispatch = dispatch_of(node) if "order" in arguments(node) else node
    placed = arguments(dispatch)["x"].meta.get("placements", {}).get(axis)
    return placed.blocks if isinstance(placed, Shard) and placed.dim == 0 else ()

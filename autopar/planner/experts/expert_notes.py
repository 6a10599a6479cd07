"""What a plan says of layers of experts: rows and bytes, evenly and at worst, groups of routers on nodes, capacities,
and weights that stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch.fx import GraphModule, Node

from autopar.cost.expert_traffic import copy_bytes
from autopar.ir.expert_layers import ExpertPlan, dispatches, expert_weights, pairs_per_expert
from autopar.ir.graph import arguments, global_shape
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.planner.experts.expert_axis import cuts_tokens, routing_of
from autopar.planner.experts.router_groups import groups_on_nodes
from autopar.token_dispatchers import TOKEN_DISPATCHERS, Routing


def capacity_notes(gm: GraphModule, options: Options) -> list[tuple[str, str]]:
    """How many tokens an expert takes. Raises ValueError for a capacity that no step can keep."""
    if not options.capacity_factor:
        return []
    found = dispatches(gm)
    if not found:
        raise ValueError(
            f"capacity_factor: is one of experts, found capacity_factor={options.capacity_factor} and a model without "
            "any that autopar knows (autopar::moe_dispatch); leave it out"
        )
    limits = {pairs_per_expert(node, options.capacity_factor): node for node in reversed(found)}
    return [
        (
            f"experts of {node.name}",
            f"each expert takes at most {limit} of {math.prod(global_shape(arguments(node)['expert']))} pairs of a "
            "token and an expert, the first ones of the whole batch; a pair that is dropped adds nothing",
        )
        for limit, node in limits.items()
    ]


def expert_notes(
    gm: GraphModule, mesh: Mesh, options: Options, plans: Mapping[str, ExpertPlan]
) -> list[tuple[str, str]]:
    """How many rows a rank's experts get, and which weights stay whole."""
    found: dict[str, list[str]] = {}
    for node in dispatches(gm):
        if node.name in plans:
            found.setdefault(_rows_of(node, mesh, options, plans[node.name]), []).append(node.name)
    more = {text: f" and {len(names) - 1} more" * (len(names) > 1) for text, names in found.items()}
    rows = [(f"experts of {names[0]}{more[text]}", text) for text, names in found.items()]
    rows += _groups(gm, mesh, options, plans)
    return [*rows, *_whole_weights(gm, plans)]


def _groups(gm: GraphModule, mesh: Mesh, options: Options, plans: Mapping[str, ExpertPlan]) -> list[tuple[str, str]]:
    """Whether the groups of experts to which routers limit a token fall on nodes."""
    routings = {n.name: routing_of(n, mesh, options, plans[n.name].axis)[0] for n in dispatches(gm) if n.name in plans}
    said = {n: groups_on_nodes(r) for n, r in routings.items()}
    firsts = {text: name for name, text in reversed(said.items()) if text}
    return [(f"router of {name}", text) for text, name in firsts.items()]


def _rows_of(dispatch: Node, mesh: Mesh, options: Options, chosen: ExpertPlan) -> str:
    args, (routing, own) = arguments(dispatch), routing_of(dispatch, mesh, options, chosen.axis)
    row = global_shape(args["x"])[1] * args["x"].meta["val"].dtype.itemsize
    apart = cuts_tokens(chosen.axis, options)
    even, worst = (n // (1 if apart else routing.ranks) for n in (own * routing.top_k, routing.worst_rows(own)))
    moved = f"; it sends {_moved(dispatch, own, routing, options, chosen)}, in a layer and step" if apart else ""
    return (
        f"a rank's experts get {even} rows if routing is even, which memory and times are estimated for, and at most "
        f"{worst} ({row * even / 1e6:.3g} and {row * worst / 1e6:.3g} MB for each value of that width){moved}"
    )


def _moved(dispatch: Node, own: int, routing: Routing, options: Options, chosen: ExpertPlan) -> str:
    """Bytes that a rank sends on each level, evenly and at most."""
    x, way = arguments(dispatch)["x"], chosen.token_dispatcher
    width, itemsize = global_shape(x)[1], x.meta["val"].dtype.itemsize
    copy = copy_bytes(routing, way, own * options.microbatches, width, itemsize) / 1e6
    places = ("within a node", "between nodes") if routing.nodes > 1 else ("over the axis",)
    row = TOKEN_DISPATCHERS[way]
    sent = zip(places, row.copies(routing), row.most_copies(routing), strict=False)
    return ", and ".join(f"{even * copy:.3g} MB {place}, at most {most * copy:.3g}" for place, even, most in sent)


def _whole_weights(gm: GraphModule, plans: Mapping[str, ExpertPlan]) -> list[tuple[str, str]]:
    """Notes on layers whose weights the forward makes, such as by a stack: stored whole, computed with in parts."""
    found = ((node, [x for x in expert_weights(node) if x.op != "placeholder"]) for node in dispatches(gm))
    return [
        (
            f"experts of {node.name}",
            f"{len(made)} weights are made in the forward ({', '.join(sorted({str(x.target) for x in made}))}): every "
            f"rank of {plans[node.name].axis} stores and makes them whole, and computes with its own; zero=3 cuts "
            "what is stored",
        )
        for node, made in found
        if made and node.name in plans
    ]

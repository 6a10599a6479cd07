"""Which experts are sharded on which axis, and how tokens reach them."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping

import torch
from torch.fx import GraphModule, Node

from autopar.cost.expert_traffic import copy_bytes
from autopar.cost.topology import Topologies
from autopar.ir.expert_layers import (
    ExpertPlan,
    axis_of_experts,
    dispatches,
    expert_weights,
    pairs_per_expert,
)
from autopar.ir.graph import arguments, describe, global_shape, is_call, reach
from autopar.ir.mesh import Mesh
from autopar.options import EXPERT_AXES, Options
from autopar.planner.experts.expert_axis import cuts_tokens, exchange_costs, groups_on_nodes, routing_of
from autopar.token_dispatchers import TOKEN_DISPATCHERS, Routing

ALLGATHER = "allgather"
_OR_PRODUCTS = (
    ", or rows [experts, capacity, width] of a one-hot product in batched products with weights [experts, ...]"
)
ours = torch.ops.autopar
DRAWS = (ours.dropout.default, ours.random.default)


def plan_experts(
    gm: GraphModule, mesh: Mesh, options: Options, axis: str, one_hot: Mapping[str, int] | None = None
) -> dict[str, ExpertPlan]:
    """Name of a dispatch -> its plan: the token dispatcher that was asked for, or the fastest by estimate, with experts
    sharded on ``axis`` ("": not sharded). Experts that do not divide are padded. ``one_hot``: the numbers of experts of
    `one_hot_experts`, which need no plan. Raises ValueError for a model without experts, and for fewer experts than
    ranks."""
    if not axis:
        return {}
    ranks, found = mesh.size(axis), dispatches(gm)
    if not found and not one_hot:
        others = "use dp instead" if axis == "ep" else "leave the option expert_axis out"
        raise ValueError(
            f"experts: nothing to shard on axis {axis!r} of size {ranks}: the model has no experts that autopar knows "
            f"(tokens sorted or selected by expert{_OR_PRODUCTS if axis == 'ep' else ''}); {others}"
        )
    for experts in {*(int(arguments(node)["num_experts"]) for node in found), *(one_hot or {}).values()}:
        _check_enough(experts, axis, mesh)
    return {node.name: _chosen(node, mesh, options, axis) for node in found}


def _chosen(dispatch: Node, mesh: Mesh, options: Options, axis: str) -> ExpertPlan:
    asked, ranks, wiring = options.token_dispatcher, mesh.size(axis), Topologies.parse(options.topology)
    per_node = wiring.per_node(axis) or ranks
    several = 1 < per_node < ranks
    if asked != "auto" and TOKEN_DISPATCHERS[asked].over_nodes and not several:
        raise ValueError(
            f"experts: token_dispatcher={asked!r} needs an axis {axis!r} over several nodes of several ranks, "
            f"found {ranks} ranks in nodes of {per_node}; give the ranks per node, such as "
            f'topology="{axis}%8=switch", or use token_dispatcher="alltoall_dedup"'
        )
    if not cuts_tokens(axis, options):
        chosen = ALLGATHER if asked == "auto" else asked
        if not TOKEN_DISPATCHERS[chosen].gathers:
            raise ValueError(
                f"experts: ranks of axis {axis!r} have the same tokens, found token_dispatcher={asked!r}, which sends "
                "tokens; set sequence_parallel=True, or leave token_dispatcher out"
            )
        return ExpertPlan(axis, chosen, f"ranks of {axis} have the same tokens: results are summed")
    if asked != "auto":
        return ExpertPlan(axis, asked, "asked for", per_node if several else 0)
    seconds = exchange_costs(dispatch, mesh, options, axis)
    times = ", ".join(f"{name} {took * 1e3:.3g} ms" for name, took in seconds.items())
    nodes = f" on nodes of {per_node} ranks" if several else ""
    chosen = min(seconds, key=seconds.__getitem__)
    return ExpertPlan(axis, chosen, f"by estimated time of a layer{nodes}: {times}", per_node if several else 0)


def _check_enough(experts: int, axis: str, mesh: Mesh) -> None:
    """Experts that do not divide over the ranks are padded, but there must not be fewer of them."""
    ranks = mesh.size(axis)
    if experts < ranks:
        fits = [n for n in range(2, experts + 1) if experts % n == 0]
        within = [n for n in fits if ranks % n == 0]
        split = f": {axis}={ranks // within[-1]},ep={within[-1]} for this {axis}={ranks}" if within else ""
        others = "and dp for the others" if axis == "ep" else f"or an axis ep beside {axis}{split}"
        raise ValueError(
            f"experts: {experts} experts do not divide over axis {axis!r} of size {ranks}; use one of "
            f"{', '.join(map(str, fits))} ranks, {others}"
        )


def check_draws(gm: GraphModule, mesh: Mesh, microbatches: int) -> None:
    """Raises ValueError for random numbers that are drawn for each row in the order of experts. Sharding tokens changes
    that order, so a rank could not draw the numbers that one process draws for the same tokens."""
    if mesh.data_size * mesh.size("cp") * microbatches == 1:
        return
    for node in dispatches(gm):
        rows = [x for x in node.users if is_call(x, operator.getitem) and x.args[1] == 0]
        between = set(reach(rows, lambda x: [] if is_call(x, ours.moe_combine.default) else list(x.users)))
        drawn = next((x for x in gm.graph.nodes if x in between and is_call(x, *DRAWS)), None)
        if drawn is not None:
            raise ValueError(
                f"experts: {describe(drawn)} draws a random number for each row in the order of experts, and that "
                "order changes when the batch is sharded; set dropout inside experts to 0, or draw for the tokens "
                "before they are dispatched"
            )


def check_experts(gm: GraphModule, mesh: Mesh, plans: Mapping[str, ExpertPlan]) -> None:
    """Check that a plan that was read has a valid axis and token dispatcher for each layer of experts. Raises
    ValueError."""
    alone = mesh.size("ep") > 1  # a dedicated axis
    axis = "ep" if alone else axis_of_experts(plans)
    ranks = mesh.size(axis) if axis in EXPERT_AXES else 1
    for name, chosen in plans.items():
        if chosen.axis != axis or ranks == 1:
            which = "'ep'" if alone else f"the same one of {', '.join(EXPERT_AXES)} for all layers"
            raise ValueError(
                f"plan: experts of {name} are sharded on {chosen.axis!r}, which must be {which} and an axis of the "
                f"mesh {mesh}; make a plan for this mesh"
            )
        if chosen.token_dispatcher not in TOKEN_DISPATCHERS:
            raise ValueError(
                f"plan: unknown token dispatcher {chosen.token_dispatcher!r} for the experts of {name}; use one of "
                f"{', '.join(TOKEN_DISPATCHERS)}"
            )
        several = 1 < chosen.per_node < ranks and ranks % chosen.per_node == 0
        if TOKEN_DISPATCHERS[chosen.token_dispatcher].over_nodes and not several:
            raise ValueError(
                f"plan: the token dispatcher {chosen.token_dispatcher!r} needs several nodes of several ranks, found "
                f"{chosen.per_node} ranks per node for the experts of {name} and {ranks} ranks of axis {axis!r}; make "
                "a plan for this mesh"
            )
    for node in dispatches(gm) if ranks > 1 else ():
        if node.name not in plans:
            raise ValueError(
                f"plan: no entry for the experts of {node.name} on axis {axis!r}; make a plan for this model"
            )
        _check_enough(int(arguments(node)["num_experts"]), axis, mesh)


def expert_parameters(gm: GraphModule, names: Mapping[Node, str], plans: Mapping[str, ExpertPlan]) -> set[str]:
    """Names of the parameters with one entry per expert along dim 0, of layers whose experts are sharded."""
    return {
        names[x]
        for node in dispatches(gm)
        if node.name in plans
        for x in expert_weights(node)
        if x in names and len(global_shape(x)) > 1
    }


# --- what a plan says of experts -----------------------------------------------------------------------


def capacity_notes(gm: GraphModule, options: Options) -> list[tuple[str, str]]:
    """Notes on how many tokens an expert takes. Raises ValueError for a capacity factor without experts."""
    if not options.capacity_factor:
        return []
    found = dispatches(gm)
    if not found:
        raise ValueError(
            f"capacity_factor: needs experts, found capacity_factor={options.capacity_factor} and a model without "
            "any that autopar knows (autopar::moe_dispatch); leave it out"
        )
    limits = {pairs_per_expert(node, options.capacity_factor): node for node in reversed(found)}
    return [
        (
            f"experts of {node.name}",
            f"each expert takes at most {limit} of {math.prod(global_shape(arguments(node)['expert']))} pairs (token, "
            "expert), the first ones of the global batch; a dropped pair adds nothing",
        )
        for limit, node in limits.items()
    ]


def expert_notes(
    gm: GraphModule, mesh: Mesh, options: Options, plans: Mapping[str, ExpertPlan], sharded: Collection[Node] = ()
) -> list[tuple[str, str]]:
    """Notes on how many rows a rank's experts get, and on weights that the forward computes, of which some are
    ``sharded``."""
    found: dict[str, list[str]] = {}
    for node in dispatches(gm):
        if node.name in plans:
            found.setdefault(_rows_of(node, mesh, options, plans[node.name]), []).append(node.name)
    more = {text: f" and {len(names) - 1} more" * (len(names) > 1) for text, names in found.items()}
    rows = [(f"experts of {names[0]}{more[text]}", text) for text, names in found.items()]
    rows += _groups(gm, mesh, options, plans)
    return [*rows, *_computed_weights(gm, plans, sharded)]


def _groups(gm: GraphModule, mesh: Mesh, options: Options, plans: Mapping[str, ExpertPlan]) -> list[tuple[str, str]]:
    """Notes on whether the groups of experts to which routers limit a token divide over nodes."""
    routings = {n.name: routing_of(n, mesh, options, plans[n.name].axis)[0] for n in dispatches(gm) if n.name in plans}
    said = {n: groups_on_nodes(r) for n, r in routings.items()}
    firsts = {text: name for name, text in reversed(said.items()) if text}
    return [(f"router of {name}", text) for text, name in firsts.items()]


def _rows_of(dispatch: Node, mesh: Mesh, options: Options, chosen: ExpertPlan) -> str:
    args, (routing, own) = arguments(dispatch), routing_of(dispatch, mesh, options, chosen.axis)
    row = global_shape(args["x"])[1] * args["x"].meta["val"].dtype.itemsize
    apart = cuts_tokens(chosen.axis, options)
    even, worst = (n // (1 if apart else routing.ranks) for n in (own * routing.top_k, routing.worst_rows(own)))
    moved = f"; it sends {_moved(dispatch, own, routing, options, chosen)}, per layer and step" if apart else ""
    return (
        f"a rank's experts get {even} rows if routing is even, which estimates of memory and time assume, and at most "
        f"{worst} ({row * even / 1e6:.3g} and {row * worst / 1e6:.3g} MB for each value of that width){moved}"
    )


def _moved(dispatch: Node, own: int, routing: Routing, options: Options, chosen: ExpertPlan) -> str:
    """Bytes that a rank sends on each level, with even routing and at most."""
    x, way = arguments(dispatch)["x"], chosen.token_dispatcher
    width, itemsize = global_shape(x)[1], x.meta["val"].dtype.itemsize
    copy = copy_bytes(routing, way, own * options.microbatches, width, itemsize) / 1e6
    places = ("within a node", "between nodes") if routing.nodes > 1 else ("over the axis",)
    row = TOKEN_DISPATCHERS[way]
    sent = zip(places, row.copies(routing), row.most_copies(routing), strict=False)
    return ", and ".join(f"{even * copy:.3g} MB {place}, at most {most * copy:.3g}" for place, even, most in sent)


def _computed_weights(
    gm: GraphModule, plans: Mapping[str, ExpertPlan], sharded: Collection[Node]
) -> list[tuple[str, str]]:
    """Notes on layers whose weights the forward computes, such as by a stack."""
    found: dict[tuple[str, str], list[Node]] = {}
    for dispatch in dispatches(gm):
        for x in expert_weights(dispatch) if dispatch.name in plans else ():
            if x.op != "placeholder":
                how = _PARTS if x in sharded else _WHOLE
                found.setdefault((dispatch.name, how.format(axis=plans[dispatch.name].axis)), []).append(x)
    return [
        (
            f"experts of {name}",
            f"{len(made)} weights are computed in the forward ({', '.join(sorted({str(x.target) for x in made}))}): "
            + how,
        )
        for (name, how), made in found.items()
    ]


_PARTS = (
    "every rank of {axis} stores a part of all of them; where that is not by expert, an all-to-all gives it its own "
    "experts' for each forward and backward, and sends the gradients back"
)
_WHOLE = "every rank of {axis} stores and computes all of them, and uses its own experts'; zero=3 shards what is stored"

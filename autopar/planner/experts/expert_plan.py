"""Which experts are cut over which axis, and how tokens get to them."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from autopar.cost.topology import Topologies
from autopar.ir.expert_layers import ExpertPlan, axis_of_experts, dispatches, expert_weights
from autopar.ir.graph import arguments, describe, global_shape, is_call, reach
from autopar.ir.mesh import Mesh
from autopar.options import EXPERT_AXES, Options
from autopar.planner.experts.expert_axis import cuts_tokens, exchange_costs
from autopar.token_dispatchers import TOKEN_DISPATCHERS

ALLGATHER = "allgather"
ours = torch.ops.autopar
DRAWS = (ours.dropout.default, ours.random.default)


def plan_experts(gm: GraphModule, mesh: Mesh, options: Options, axis: str) -> dict[str, ExpertPlan]:
    """By dispatch: as was asked for, or what takes least time by estimate, with experts over an axis ("": not cut).
    Raises ValueError for a model without experts, and for experts that do not divide."""
    if not axis:
        return {}
    ranks, found = mesh.size(axis), dispatches(gm)
    if not found:
        others = "use dp for what is not cut by expert" if axis == "ep" else "leave the option experts out"
        raise ValueError(
            f"experts: nothing to cut over axis {axis!r} of size {ranks}: the model has no experts that autopar knows "
            f"(autopar::moe_dispatch); {others}"
        )
    for node in found:
        _check_divides(node, axis, mesh)
    return {node.name: _chosen(node, mesh, options, axis) for node in found}


def _chosen(dispatch: Node, mesh: Mesh, options: Options, axis: str) -> ExpertPlan:
    asked, ranks, wiring = options.token_dispatcher, mesh.size(axis), Topologies.parse(options.topology)
    per_node = wiring.per_node(axis) or ranks
    several = 1 < per_node < ranks
    if asked != "auto" and TOKEN_DISPATCHERS[asked].over_nodes and not several:
        raise ValueError(
            f"experts: token_dispatcher={asked!r} needs an axis {axis!r} over several nodes of several ranks, "
            f"found {ranks} ranks in nodes of {per_node}; say how many are a node, such as "
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
    return ExpertPlan(axis, chosen, f"by estimate of a layer{nodes}: {times}", per_node if several else 0)


def _check_divides(dispatch: Node, axis: str, mesh: Mesh) -> None:
    experts, ranks = int(arguments(dispatch)["num_experts"]), mesh.size(axis)
    if experts % ranks:
        fits = [n for n in range(2, experts + 1) if experts % n == 0]
        within = [n for n in fits if ranks % n == 0]
        split = f": {axis}={ranks // within[-1]},ep={within[-1]} for this {axis}={ranks}" if within else ""
        others = "and dp for the others" if axis == "ep" else f"or an axis ep beside {axis}{split}"
        raise ValueError(
            f"experts: {experts} experts do not divide over axis {axis!r} of size {ranks}; use one of "
            f"{', '.join(map(str, fits))} ranks, {others}"
        )


def check_draws(gm: GraphModule, mesh: Mesh, microbatches: int) -> None:
    """Raises ValueError for random numbers drawn row by row in the order of experts, which no cut of the tokens
    keeps: a rank's rows have other numbers then than those of one process, or as many as nobody knows."""
    if mesh.data_size * mesh.size("cp") * microbatches == 1:
        return
    for node in dispatches(gm):
        rows = [x for x in node.users if is_call(x, operator.getitem) and x.args[1] == 0]
        between = set(reach(rows, lambda x: [] if is_call(x, ours.moe_combine.default) else list(x.users)))
        drawn = next((x for x in gm.graph.nodes if x in between and is_call(x, *DRAWS)), None)
        if drawn is not None:
            raise ValueError(
                f"experts: {describe(drawn)} draws a random number for each row in the order of experts, and that "
                "order changes with the cut of the batch; set dropout inside of experts to 0, or draw for the tokens "
                "before they are dispatched"
            )


def check_experts(gm: GraphModule, mesh: Mesh, plans: Mapping[str, ExpertPlan]) -> None:
    """Whether a plan that was read says of each layer how its experts are cut, in words that exist. Raises
    ValueError."""
    alone = mesh.size("ep") > 1  # an axis for them
    axis = "ep" if alone else axis_of_experts(plans)
    ranks = mesh.size(axis) if axis in EXPERT_AXES else 1
    for name, chosen in plans.items():
        if chosen.axis != axis or ranks == 1:
            which = "'ep'" if alone else f"the same one of {', '.join(EXPERT_AXES)} for all layers"
            raise ValueError(
                f"plan: experts of {name} are cut over {chosen.axis!r}, which must be {which} and an axis of the mesh "
                f"{mesh}; make a plan for this mesh"
            )
        if chosen.token_dispatcher not in TOKEN_DISPATCHERS:
            raise ValueError(
                f"plan: tokens get to the experts of {name} by {chosen.token_dispatcher!r}; use one of "
                f"{', '.join(TOKEN_DISPATCHERS)}"
            )
        several = 1 < chosen.per_node < ranks and ranks % chosen.per_node == 0
        if TOKEN_DISPATCHERS[chosen.token_dispatcher].over_nodes and not several:
            raise ValueError(
                f"plan: tokens get to the experts of {name} by {chosen.token_dispatcher!r} with {chosen.per_node} "
                f"ranks per node, which must be several, and divide {ranks} ranks of axis {axis!r} into several nodes"
            )
    for node in dispatches(gm) if ranks > 1 else ():
        if node.name not in plans:
            raise ValueError(
                f"plan: nothing is said of the experts of {node.name} over axis {axis!r}; make a plan for this model"
            )
        _check_divides(node, axis, mesh)


def expert_parameters(gm: GraphModule, names: Mapping[Node, str], plans: Mapping[str, ExpertPlan]) -> dict[str, str]:
    """Name of a parameter -> the axis over which its experts are cut."""
    return {
        names[x]: plans[node.name].axis
        for node in dispatches(gm)
        if node.name in plans
        for x in expert_weights(node)
        if x in names and len(global_shape(x)) > 1
    }

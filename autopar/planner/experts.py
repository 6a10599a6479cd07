"""Which experts are cut over which axis, and how tokens get to them."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from autopar.cost.expert_traffic import Routing, dispatch_costs
from autopar.cost.hardware import DEFAULT
from autopar.cost.topology import Topologies
from autopar.ir.expert_layers import ExpertPlan, dispatches, expert_weights
from autopar.ir.graph import arguments, describe, global_shape, is_call, reach
from autopar.ir.mesh import Mesh
from autopar.options import DISPATCHES, Options

AXIS, LEVELS = "ep", "two_level"
ours = torch.ops.autopar
_DRAWS = (ours.dropout.default, ours.random.default)


def plan_experts(gm: GraphModule, mesh: Mesh, options: Options) -> dict[str, ExpertPlan]:
    """By dispatch: as was asked for, or what takes least time by estimate. Raises ValueError for a model without
    experts, and for experts that do not divide."""
    ranks, found = mesh.size(AXIS), dispatches(gm)
    if not found:
        raise ValueError(
            f"experts: nothing to cut over axis {AXIS!r} of size {ranks}: the model has no experts that autopar knows "
            "(autopar::moe_dispatch); use dp for what is not cut by expert"
        )
    for node in found:
        _check_divides(node, AXIS, ranks)
    return {node.name: _chosen(node, mesh, options) for node in found}


def _chosen(dispatch: Node, mesh: Mesh, options: Options) -> ExpertPlan:
    ranks, wiring = mesh.size(AXIS), Topologies.parse(options.topology, DEFAULT.links)
    per_node = wiring.per_node(AXIS) or ranks
    several = 1 < per_node < ranks
    if options.dispatch == LEVELS and not several:
        raise ValueError(
            f"experts: dispatch={LEVELS!r} needs an axis {AXIS!r} over several nodes of several ranks, found "
            f'{ranks} ranks in nodes of {per_node}; say how many are a node, such as topology="{AXIS}%8=switch", '
            'or use dispatch="dedup"'
        )
    if options.dispatch != "auto":
        return ExpertPlan(AXIS, options.dispatch, "asked for", per_node if several else 0)
    args = arguments(dispatch)
    width, (routing, own) = global_shape(args["x"])[1], _routing(dispatch, mesh, options)
    wires = wiring.of(f"{AXIS}%{per_node}"), wiring.of(f"{AXIS}/{per_node}")
    costs = dispatch_costs(routing, own, width, args["x"].meta["val"].dtype.itemsize, *wires)
    seconds = {c.name: c.seconds for c in costs if c.name != LEVELS or several}
    times = ", ".join(f"{name} {took * 1e3:.3g} ms" for name, took in seconds.items())
    nodes = f" on nodes of {per_node} ranks" if several else ""
    chosen = min(seconds, key=seconds.__getitem__)
    return ExpertPlan(AXIS, chosen, f"by estimate of a layer{nodes}: {times}", per_node if several else 0)


def _check_divides(dispatch: Node, axis: str, ranks: int) -> None:
    experts = int(arguments(dispatch)["num_experts"])
    if experts % ranks:
        fits = [n for n in range(2, experts + 1) if experts % n == 0]
        raise ValueError(
            f"experts: {experts} experts do not divide over axis {axis!r} of size {ranks}; use one of "
            f"{', '.join(map(str, fits))} ranks, and dp for the others"
        )


def check_draws(gm: GraphModule, mesh: Mesh, micro_batches: int) -> None:
    """Raises ValueError for random numbers drawn row by row in the order of experts, which no cut of the tokens
    keeps: a rank's rows have other numbers then than those of one process, or as many as nobody knows."""
    if mesh.data_size * mesh.size("cp") * micro_batches == 1:
        return
    for node in dispatches(gm):
        rows = [x for x in node.users if is_call(x, operator.getitem) and x.args[1] == 0]
        between = set(reach(rows, lambda x: [] if is_call(x, ours.moe_combine.default) else list(x.users)))
        drawn = next((x for x in gm.graph.nodes if x in between and is_call(x, *_DRAWS)), None)
        if drawn is not None:
            raise ValueError(
                f"experts: {describe(drawn)} draws a random number for each row in the order of experts, and that "
                "order changes with the cut of the batch; set dropout inside of experts to 0, or draw for the tokens "
                "before they are dispatched"
            )


def check_experts(gm: GraphModule, mesh: Mesh, plans: Mapping[str, ExpertPlan]) -> None:
    """Whether a plan that was read says of each layer how its experts are cut, in words that exist. Raises
    ValueError."""
    for name, chosen in plans.items():
        if chosen.axis != AXIS or mesh.size(AXIS) == 1:
            raise ValueError(
                f"plan: experts of {name} are cut over {chosen.axis!r}, which must be {AXIS!r} and an axis of the mesh "
                f"{mesh}; make a plan for this mesh"
            )
        if chosen.dispatch not in DISPATCHES:
            raise ValueError(
                f"plan: tokens get to the experts of {name} by {chosen.dispatch!r}; use one of {', '.join(DISPATCHES)}"
            )
        ranks = mesh.size(AXIS)
        if chosen.dispatch == LEVELS and not (1 < chosen.per_node < ranks and ranks % chosen.per_node == 0):
            raise ValueError(
                f"plan: tokens get to the experts of {name} by {LEVELS!r} with {chosen.per_node} ranks per node, which "
                f"must be several, and divide {ranks} ranks of axis {AXIS!r} into several nodes"
            )
    for node in dispatches(gm) if mesh.size(AXIS) > 1 else ():
        if node.name not in plans:
            raise ValueError(
                f"plan: nothing is said of the experts of {node.name} over axis {AXIS!r}; make a plan for this model"
            )
        _check_divides(node, AXIS, mesh.size(AXIS))


def expert_parameters(gm: GraphModule, names: Mapping[Node, str], plans: Mapping[str, ExpertPlan]) -> dict[str, str]:
    """Name of a parameter -> the axis over which its experts are cut."""
    return {
        names[x]: plans[node.name].axis
        for node in dispatches(gm)
        if node.name in plans
        for x in expert_weights(node)
        if x in names and len(global_shape(x)) > 1
    }


def expert_notes(
    gm: GraphModule, mesh: Mesh, options: Options, plans: Mapping[str, ExpertPlan]
) -> list[tuple[str, str]]:
    """How many rows a rank's experts get, and which weights stay whole."""
    found: dict[str, list[str]] = {}
    for node in dispatches(gm):
        if node.name in plans:
            found.setdefault(_rows_of(node, mesh, options), []).append(node.name)
    more = {text: f" and {len(names) - 1} more" * (len(names) > 1) for text, names in found.items()}
    rows = [(f"experts of {names[0]}{more[text]}", text) for text, names in found.items()]
    return [*rows, *_whole_weights(gm, plans)]


def _rows_of(dispatch: Node, mesh: Mesh, options: Options) -> str:
    args, (routing, own) = arguments(dispatch), _routing(dispatch, mesh, options)
    row = global_shape(args["x"])[1] * args["x"].meta["val"].dtype.itemsize
    even, worst = own * routing.top_k, routing.worst_rows(own)
    return (
        f"a rank's experts get {even} rows if routing is even, which memory and times are estimated for, and at most "
        f"{worst} ({row * even / 1e6:.3g} and {row * worst / 1e6:.3g} MB for each value of that width)"
    )


def _routing(dispatch: Node, mesh: Mesh, options: Options) -> tuple[Routing, int]:
    """How tokens choose, and how many of them a rank has at a time."""
    args, ranks = arguments(dispatch), mesh.size(AXIS)
    tokens, top = global_shape(args["expert"])
    per_node = Topologies.parse(options.topology).per_node(AXIS) or ranks
    experts = int(args["num_experts"])
    own = math.ceil(tokens / (mesh.data_size * mesh.size("cp") * options.micro_batches))
    return Routing(experts, min(top, experts), ranks, per_node), own


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

"""The axis that experts are sharded on: a dedicated one (ep), one shared with batch, sequence or weights, or none.

Sharing an axis is what Megatron calls parallel folding: with experts over dp, each rank of dp has different samples and
some of the experts, whose gradients are then not summed over dp. If every rank has all experts, no tokens are
exchanged, but the gradients of all experts are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from autopar.cost.expert_traffic import dispatch_costs
from autopar.cost.hardware import Links
from autopar.cost.topology import Topologies
from autopar.ir.expert_layers import axis_of_experts, dispatches, expert_weights
from autopar.ir.graph import arguments, global_shape, is_call, reach
from autopar.ir.mesh import Mesh
from autopar.options import DECLARED, EXPERT_AXES, Options
from autopar.plan import Plan
from autopar.token_dispatchers import TOKEN_DISPATCHERS, Routing

WHOLE = "replicated"  # every rank has all experts
_SUMS = ("dp", "cp")  # axes over which gradients of weights are summed, or under ZeRO gathered and scattered


def expert_axis(gm: GraphModule, mesh: Mesh, options: Options) -> tuple[str, str]:
    """(axis, why): as requested, or the fastest by estimate; "" if experts are not sharded."""
    if options.expert_axis != "auto":
        return (options.expert_axis if mesh.size(options.expert_axis) > 1 else ""), ""
    if mesh.size("ep") > 1:
        return "ep", ""
    layers = dispatches(gm)
    axes = [a for a in EXPERT_AXES if mesh.size(a) > 1 and all(_divides(node, mesh.size(a)) for node in layers)]
    if not layers or not axes:
        return "", ""
    seconds = {axis: sum(_seconds(node, mesh, options, axis) for node in layers) for axis in (WHOLE, *axes)}
    chosen = min(seconds, key=seconds.__getitem__)
    times = ", ".join(f"{name} {took * 1e3:.3g} ms" for name, took in seconds.items())
    return ("" if chosen == WHOLE else chosen), f"axis by estimated time of all layers: {times}"


def kept_axis(asked: Options, plan: Plan) -> str:
    """The expert axis of an earlier plan, by which parameters are sharded. Raises ValueError if the options name
    another."""
    axis = "ep" if plan.mesh.size("ep") > 1 else axis_of_experts(plan.experts)
    if asked.expert_axis not in ("auto", DECLARED["expert_axis"].default, axis):
        found = f"on {axis!r}" if axis else "on no axis"
        raise ValueError(
            f"expert_axis: the given plan shards experts {found}, found expert_axis={asked.expert_axis!r}; leave "
            "the option out, or make a plan with it"
        )
    return axis


def cuts_tokens(axis: str, options: Options) -> bool:
    """Whether ranks of an axis have different tokens at the inputs of experts."""
    return axis != "tp" or options.sequence_parallel


def routing_of(dispatch: Node, mesh: Mesh, options: Options, axis: str) -> tuple[Routing, int]:
    """(routing, tokens that a rank has per microbatch)."""
    args, ranks = arguments(dispatch), mesh.size(axis)
    top = global_shape(args["expert"])[1]
    per_node = Topologies.parse(options.topology).per_node(axis) or ranks
    experts = int(args["num_experts"])
    parts = ranks if axis == "tp" and cuts_tokens(axis, options) else 1
    limited = router_groups(dispatch)
    padded = -(-experts // ranks) * ranks  # with those that no token chooses
    if padded % limited[0]:
        limited = (1, 1)
    return Routing(padded, min(top, experts), ranks, per_node, *limited), math.ceil(
        _tokens(dispatch, mesh, options) / parts
    )


def _tokens(dispatch: Node, mesh: Mesh, options: Options) -> float:
    """Tokens of a rank per microbatch, if tp does not shard them."""
    parts = mesh.data_size * mesh.size("cp") * options.microbatches
    return global_shape(arguments(dispatch)["expert"])[0] / parts


def exchange_costs(dispatch: Node, mesh: Mesh, options: Options, axis: str) -> dict[str, float]:
    """Token dispatcher -> seconds per layer and step, where ranks of the axis have different tokens."""
    x, (routing, own) = arguments(dispatch)["x"], routing_of(dispatch, mesh, options, axis)
    links = Links.of(options, mesh)
    wires = links.axis(f"{axis}%{routing.per_node}"), links.axis(f"{axis}/{routing.per_node}")
    costs = dispatch_costs(routing, own, global_shape(x)[1], x.meta["val"].dtype.itemsize, *wires)
    several = 1 < routing.per_node < routing.ranks
    return {c.name: c.seconds for c in costs if several or not TOKEN_DISPATCHERS[c.name].over_nodes}


def _divides(dispatch: Node, ranks: int) -> bool:
    return int(arguments(dispatch)["num_experts"]) % ranks == 0


def _seconds(dispatch: Node, mesh: Mesh, options: Options, axis: str) -> float:
    """Seconds of a layer's exchanges in a step: tokens, sums of partial results over tp, and gradients of weights."""
    links, x = Links.of(options, mesh), arguments(dispatch)["x"]
    tokens = _tokens(dispatch, mesh, options) * options.microbatches
    rows = tokens * global_shape(x)[1] * x.meta["val"].dtype.itemsize
    found = 0.0
    if (tp := mesh.size("tp")) > 1 and (axis != "tp" or not cuts_tokens("tp", options)):
        ways = ("all_gather", "reduce_scatter") if options.sequence_parallel else ("all_reduce",)
        each = rows * (tp - 1) / tp * (1 if options.sequence_parallel else 2)
        found += sum(links.seconds("tp", way, 2 * each, 2 * options.microbatches) for way in ways)
    if axis != WHOLE and cuts_tokens(axis, options):
        found += options.microbatches * min(exchange_costs(dispatch, mesh, options, axis).values())
    weights = expert_weights(dispatch)
    held = _bytes(weights) / tp / (mesh.size(axis) if axis in _SUMS else 1)
    if axis in _SUMS and (computed := [w for w in weights if w.op != "placeholder"]):
        calls = 3 * options.microbatches  # of each: for a forward, for a backward, and of its gradient
        ranks = mesh.size(axis)
        sent = calls * _bytes(computed) / tp / ranks * (ranks - 1) / ranks
        found += links.seconds(axis, "all_to_all", sent, calls * len(computed))
    for other in _SUMS:
        if other != axis and (ranks := mesh.size(other)) > 1:
            # gathered in forward and backward, and scattered; or gathered once and scattered, which is as much as a sum
            passes = 3 if options.shards_parameters and not options.gathers_once else 2
            found += links.seconds(other, "all_reduce", passes * held * (ranks - 1) / ranks)
    return found


def _bytes(weights: Sequence[Node]) -> float:
    return float(sum(math.prod(global_shape(w)) * w.meta["val"].dtype.itemsize for w in weights))


# --- groups of experts that a router chooses first -----------------------------------------------------

aten = torch.ops.aten
_PRODUCTS = (aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default, aten.bmm.default)


def router_groups(dispatch: Node) -> tuple[int, int]:
    """(number of groups of consecutive experts, number of groups that a token may use); (1, 1) without. Node-limited
    routing (DeepSeek-V3, 2.1.2), found by dataflow: such a router chooses among scores of groups before it chooses
    experts.

        grouped = scores.view(T, 8, 32); best = grouped.topk(2)[0].sum(-1)
        allowed = best.topk(4)[1]  -->  ...  -->  expert = masked.topk(8)[1]         # 4 of 8 groups
    """
    args = arguments(dispatch)
    experts = int(args["num_experts"])
    top = global_shape(args["expert"])[-1]
    router = reach([args["expert"]], lambda node: [] if is_call(node, *_PRODUCTS) else node.all_input_nodes)
    for node in router:
        if is_call(node, aten.topk.default):
            known = arguments(node)
            shape, limit = global_shape(known["self"]), int(known["k"])
            groups = shape[int(known["dim"])]
            flat = len(shape) == 2 and int(known["dim"]) % 2 == 1
            if flat and groups < experts and experts % groups == 0 and limit < groups:
                return (groups, limit) if top <= experts // groups * limit else (1, 1)
    return 1, 1


def groups_on_nodes(routing: Routing) -> str:
    """The plan's note on a router's groups; "" for one node, or without a limit."""
    groups, nodes = routing.groups, routing.nodes
    if groups == 1 or nodes == 1:
        return ""
    said = f"a token uses {routing.limit} of {groups} groups of experts"
    if groups % nodes == 0:
        return (
            f"{said}, and each of {nodes} nodes has {groups // nodes}: it reaches at most {routing.most_nodes} of "
            "them, which estimates of bytes and times assume"
        )
    fits = max(n for n in range(1, min(groups, routing.ranks) + 1) if groups % n == 0 and routing.ranks % n == 0)
    return (
        f"warning: {said}, which do not divide over {nodes} nodes: it reaches up to {routing.most_nodes} of them; use "
        f"a number of nodes that divides {groups}, such as {fits} of {routing.ranks // fits} ranks"
    )

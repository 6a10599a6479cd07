"""bucket_gradients: all-reduce small gradients in buckets.

Consumes    a backward step graph.
Guarantees  all-reduces of gradients that are `is_small` run in flat buckets of at most ``bucket_bytes``, one dtype and
            axis each; a bucket starts as soon as its last member is ready and is unpacked at the end, so that it
            overlaps the backward.
Leaves      all-reduces of activations, on which the backward waits; large gradients (a copy into a bucket would cost
            more than the latency it saves, and the first of a bucket wait for the last); reduce-scatters.

    ga = all_reduce(a, "dp")               flat = cat([reshape(a), reshape(b)])
    gb = all_reduce(b, "dp")      -->      sum = all_reduce(flat, "dp")
                                           ga, gb = view(split_with_sizes_copy(sum))
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from autopar.cost.hardware import Links
from autopar.cost.traffic import transfer_seconds
from autopar.ir.graph import arguments, insert_call, is_call, nbytes, output_node, shape
from autopar.ir.meta import of_no_module
from autopar.ops.traits import PASSING
from autopar.options import Options
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass

aten = torch.ops.aten
LONE_BYTES = 2**20
LATENCY = 0.05  # of the time of a transfer: where starting takes less, a bucket saves less than it delays


class BucketGradients(Pass):
    """Buckets the all-reduces that end in gradients."""

    name = "bucket_gradients"
    requires = ("step",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        options = ctx.plan.options if ctx.plan is not None else Options()
        links = Links.of(options, ctx.mesh)
        while True:  # one sweep per axis of a chain: all-reduces over tp first, then over dp
            waves = _buckets(gm, options.bucket_bytes, links)
            if not waves:
                break
            for members in waves:
                _join(gm, members)
        gm.recompile()
        return gm


def is_small(transfer: Node, size: int, links: Links) -> bool:
    """Whether a value of ``size`` bytes is cheap to copy into a bucket, and its transfer is not much longer than the
    start of one."""
    found = transfer_seconds(transfer, links)
    start = links.seconds(arguments(transfer)["axis"], str(transfer.target).split(".")[1], 1)
    return size < LONE_BYTES and (found is None or start > LATENCY * found)


def _buckets(gm: GraphModule, limit: int, links: Links) -> list[list[Node]]:
    """Groups of at least two all-reduces that can travel together."""
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    members = [n for n in gm.graph.nodes if _is_gradient_sum(n) and is_small(n, nbytes(n), links)]
    # a member whose operand depends on another member goes to a later bucket
    first = [n for n in members if not _waits_for(n, set(members) - {n})]
    groups: dict[tuple[object, ...], list[list[Node]]] = {}
    for node in sorted(first, key=order.__getitem__):
        open_groups = groups.setdefault((node.args[1], node.args[2], node.meta["val"].dtype), [[]])
        if sum(map(nbytes, open_groups[-1])) + nbytes(node) > limit:
            open_groups.append([])
        open_groups[-1].append(node)
    return [g for found in groups.values() for g in found if len(g) > 1]


def _is_gradient_sum(node: Node) -> bool:
    """Whether it is an all-reduce whose result only becomes a gradient, through further reductions or reshapes."""
    if not is_call(node, torch.ops.autopar.all_reduce.default) or node.meta.get("bucket"):
        return False
    return ends_in_output(node)


def ends_in_output(node: Node) -> bool:
    """Whether a value only becomes results: through reductions, reshapes, and sums with inputs (the gradients that
    earlier microbatches accumulated)."""
    passing = (torch.ops.autopar.all_reduce.default, *PASSING)
    return bool(node.users) and all(
        u.op == "output" or ((is_call(u, *passing) or _adds_given(u)) and ends_in_output(u)) for u in node.users
    )


def _adds_given(node: Node) -> bool:
    return is_call(node, aten.add.Tensor) and len(_made_operands(node)) == 1


def _made_operands(node: Node) -> list[Node]:
    return [x for x in node.all_input_nodes if x.op != "placeholder"]


def _waits_for(node: Node, others: set[Node]) -> bool:
    """Whether a chain of reshapes and reductions leads from another member to this one."""
    x = node.args[0]
    while isinstance(x, Node) and x.op == "call_function" and len(made := _made_operands(x)) == 1:
        if x in others:
            return True
        x = made[0]
    return isinstance(x, Node) and x in others


def _join(gm: GraphModule, members: list[Node]) -> None:
    graph, last = gm.graph, members[-1]
    _, axis, op = last.args
    sizes = [m.meta["val"].numel() for m in members]
    flat = []
    for m in members:
        x = m.args[0]
        assert isinstance(x, Node)
        val = x.meta["val"].reshape(-1)
        flat.append(insert_call(last, aten.reshape.default, (x, [-1]), like=x, val=val))
    val = torch.cat([f.meta["val"] for f in flat])
    packed = insert_call(last, aten.cat.default, (flat,), val=val, name="bucket")
    total = insert_call(last, torch.ops.autopar.all_reduce.default, (packed, axis, op), val=val, name="bucket_sum")
    total.meta["bucket"] = True
    end = output_node(gm)
    # copies: a view would keep the bucket alive and share storage with other gradients
    pieces = [v.clone() for v in val.split(sizes)]
    parts = insert_call(end, aten.split_with_sizes_copy.default, (total, sizes), like=last, val=pieces)
    of_no_module(packed, total, parts)
    for i, m in enumerate(members):
        part = insert_call(end, operator.getitem, (parts, i), like=m)
        new = insert_call(end, aten.view.default, (part, list(shape(m))), like=m, val=m.meta["val"])
        m.replace_all_uses_with(new)
        graph.erase_node(m)
        move_users_to_end(new, end)


def move_users_to_end(node: Node, end: Node) -> None:
    """Move the users of an unpacked gradient (an all-reduce over the next axis) behind it in the order."""
    for user in list(node.users):
        if user is not end:
            end.prepend(user)
            move_users_to_end(user, end)

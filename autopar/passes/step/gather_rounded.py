"""gather_rounded: what ranks gather only to round it is rounded first, and gathered in eight bits.

Consumes    a step graph.
Guarantees  an all-gather, of a parameter or of activations, whose result is only rounded, by one scale, becomes one of
            the rounded shards; ranks agree on the scale by an all-reduce of one maximum, or have it from earlier
            steps. Every number stays: the greatest of the whole is the greatest of the greatest, and a shard is rounded
            as it is in the whole.
Leaves      gathers whose result is used otherwise, or scaled by row, since a row's scale would be needed on its shard.

    w = all_gather(p, "dp")                           m = all_reduce(largest(p), "dp", "max")
    q = quantized(w, scale_of(largest(w)))    -->     q = all_gather(quantized(p, scale_of(m)), "dp")
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import arguments, calls_of, insert_call, is_call, run_fake
from autopar.ops.traits import PASSING, is_view

ours, aten = torch.ops.autopar, torch.ops.aten


def gather_rounded(gm: GraphModule) -> GraphModule:
    """See the module's docstring."""
    for gather in reversed(calls_of(gm.graph, ours.all_gather.default)):  # the last of a chain first
        uses = _rounded_uses(gather)
        if uses is not None:
            _round_before(gather, *uses)
    gm.recompile()
    return gm


Path = list[Node]  # views of a gathered value, and what uses the last of them


def _rounded_uses(gather: Node) -> tuple[list[Node], list[Path]] | None:
    """(what finds its magnitude, the ways to what rounds it); None if it is used otherwise, or with several scales."""
    magnitudes: list[Node] = []
    rounded: list[Path] = []
    ways: list[Path] = [[user] for user in gather.users]
    while ways:
        way = ways.pop()
        end = way[-1]
        if is_call(end, ours.largest.default) and end.meta["val"].numel() == 1:
            magnitudes.append(end)
        elif is_call(end, ours.quantized.default):
            rounded.append(way)
        elif end.target in PASSING and is_view(end.target) and end.users:
            ways += [[*way, user] for user in end.users]
        else:
            return None
    how = {way[-1].args[1:] for way in rounded}
    single = len(how) == 1 and next(iter(how))[0].meta["val"].numel() == 1  # type: ignore[union-attr]
    return (magnitudes, rounded) if magnitudes and single else None


def _round_before(gather: Node, magnitudes: list[Node], rounded: list[Path]) -> None:
    args = arguments(gather)
    shard, first = args["x"], min(magnitudes)
    flat = shard
    if shard.meta["val"].dim() != 2:
        flat = insert_call(first, aten.reshape.default, (shard, [1, -1]), like=shard)
    own = insert_call(first, ours.largest.default, (flat, [0, 1]), like=first)
    agreed = own
    if not (delayed := [n for m in magnitudes for n in m.users if is_call(n, ours.delayed_scale.default)]):
        agreed = insert_call(first, ours.all_reduce.default, (own, args["axis"], "max"), like=first)
    for magnitude in magnitudes:
        magnitude.replace_all_uses_with(agreed)
    for scale in delayed:
        scale.update_arg(1, [*arguments(scale)["axes"], args["axis"]])
    start = min(way[-1] for way in rounded)
    pieces = insert_call(start, ours.quantized.default, (shard, *start.args[1:]), like=start)
    whole = insert_call(start, ours.all_gather.default, (pieces, *gather.args[1:]), like=gather)
    for *views, end in rounded:
        value = whole
        for view in views:
            moved = insert_call(end, view.target, (value, *view.args[1:]), view.kwargs, like=view)  # type: ignore[arg-type]
            value = moved
        end.replace_all_uses_with(value)
        _renew_views(value)
    _erase({*magnitudes, *(node for way in rounded for node in way), gather})


def _renew_views(value: Node) -> None:
    """Strides of views: a transposed weight was rounded into a contiguous one."""
    for user in value.users:
        if is_view(user.target):
            user.meta["val"] = run_fake(user.graph, user.target, user.args, user.kwargs)  # type: ignore[arg-type]
            _renew_views(user)


def _erase(unused: set[Node]) -> None:
    """Nodes that no others use: the inner one of a chain of gathers must lose this user."""
    for node in sorted(unused, reverse=True):
        node.graph.erase_node(node)

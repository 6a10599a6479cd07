"""bucket_gathers: let small parameters travel together.

Consumes    a step graph whose gathers of one layer stand side by side (prefetch_gathers).
Guarantees  gathers of parameters below `LONE_BYTES` that stand side by side are one gather, and reduce-scatters of such
            gradients are one per layer, for each dtype and axis. A gather is unpacked right before its first use, so
            that it still overlaps the layer before.
Leaves      large ones, for which two copies would cost more than the latency that is saved; pieces along other dims
            than the first; gathers of activations.

    w = all_gather(p, 0)                   packed = cat([view(p, [1, -1]), view(q, [1, -1])], 1)
    v = all_gather(q, 0)         -->       both = split(all_gather(packed, 0), 1)
                                           w, v = reshape(both[0]), reshape(both[1])
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from autopar.graph import arguments, insert_call, is_call, nbytes, output_node, shape
from autopar.pass_manager import Context
from autopar.passes.prefetch_gathers import is_parameter_gather

aten = torch.ops.aten
LONE_BYTES = 2**20
GATHER = torch.ops.autopar.all_gather.default
SCATTER = torch.ops.autopar.reduce_scatter.default


@dataclass(frozen=True)
class BucketGathers:
    """Joins small gathers of parameters, and small reduce-scatters of gradients."""

    name: ClassVar[str] = "bucket_gathers"
    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ()

    def apply(self, gm: GraphModule, ctx: Context) -> GraphModule:
        for members in _runs(gm):
            _join_gathers(gm, members)
        for members in _waves(gm):
            _join_scatters(gm, members)
        gm.recompile()
        return gm


def _runs(gm: GraphModule) -> list[list[Node]]:
    """Small gathers of placeholders with nothing but gathers between them."""
    found: list[list[Node]] = []
    open_runs: dict[object, list[Node]] = {}
    for node in gm.graph.nodes:
        if not is_call(node, GATHER):
            open_runs = {}
        elif _is_small(node, arguments(node)["x"]) and arguments(node)["x"].op == "placeholder":
            key = _kind(node)
            if key not in open_runs:
                open_runs[key] = []
                found.append(open_runs[key])
            open_runs[key].append(node)
    return [members for members in found if len(members) > 1]


def _waves(gm: GraphModule) -> list[list[Node]]:
    """Small reduce-scatters that end in gradients, between two places where parameters are gathered: a layer."""
    found: list[list[Node]] = []
    last: dict[object, list[Node]] = {}
    for node in gm.graph.nodes:
        if is_parameter_gather(node) or node.meta.get("bucket"):
            last = {}
        elif is_call(node, SCATTER) and _is_small(node, node) and all(user.op == "output" for user in node.users):
            members = last.get(_kind(node))
            if members is None:
                members = last[_kind(node)] = []
                found.append(members)
            members.append(node)
    return [members for members in found if len(members) > 1]


def _is_small(node: Node, piece: Node) -> bool:
    """Whether this rank's piece is small, and one contiguous part of the first dim."""
    args = arguments(node)
    return args["dim"] == 0 and not args["blocks"] and nbytes(piece) < LONE_BYTES


def _kind(node: Node) -> object:
    args = arguments(node)
    return args["axis"], args["size"], node.meta["val"].dtype


def _join_gathers(gm: GraphModule, members: list[Node]) -> None:
    graph, first = gm.graph, members[0]
    axis, size = arguments(first)["axis"], arguments(first)["size"]
    order = {n: i for i, n in enumerate(graph.nodes)}
    sources = [arguments(m)["x"] for m in members]
    packed = _packed(gm, first, sources, 1)
    whole = insert_call(
        graph,
        first,
        GATHER,
        (packed, 0, [], axis, size),
        first,
        _like(first, (size, packed.meta["val"].shape[1])),
        "bucket",
    )
    whole.meta["bucket"] = True
    uses = {m: min(m.users, key=order.__getitem__) for m in members}
    parts = _split(gm, min(uses.values(), key=order.__getitem__), whole, [s.meta["val"].numel() for s in sources])
    for i, m in enumerate(members):
        part = insert_call(graph, uses[m], operator.getitem, (parts, i), m, parts.meta["val"][i])
        new = insert_call(graph, uses[m], aten.reshape.default, (part, list(shape(m))), m, m.meta["val"])
        m.replace_all_uses_with(new)
        graph.erase_node(m)


def _join_scatters(gm: GraphModule, members: list[Node]) -> None:
    graph, last, end = gm.graph, members[-1], output_node(gm)
    axis, size = arguments(last)["axis"], arguments(last)["size"]
    packed = _packed(gm, last, [arguments(m)["x"] for m in members], size)
    piece = insert_call(
        graph, last, SCATTER, (packed, 0, [], axis, size), last, _like(last, (1, packed.meta["val"].shape[1])), "bucket"
    )
    parts = _split(gm, end, piece, [m.meta["val"].numel() for m in members])
    for i, m in enumerate(members):
        part = insert_call(graph, end, operator.getitem, (parts, i), m, parts.meta["val"][i])
        new = insert_call(graph, end, aten.view.default, (part, list(shape(m))), m, m.meta["val"])
        m.replace_all_uses_with(new)
        graph.erase_node(m)


def _packed(gm: GraphModule, before: Node, values: list[Node], rows: int) -> Node:
    """[rows, N]: all values side by side, each cut along its first dim into rows."""
    flat = [
        insert_call(gm.graph, before, aten.reshape.default, (v, [rows, -1]), v, v.meta["val"].reshape(rows, -1))
        for v in values
    ]
    width = sum(f.meta["val"].shape[1] for f in flat)
    return insert_call(gm.graph, before, aten.cat.default, (flat, 1), before, _like(before, (rows, width)), "packed")


def _split(gm: GraphModule, before: Node, value: Node, sizes: list[int]) -> Node:
    parts = value.meta["val"].split_with_sizes(sizes, 1)
    return insert_call(gm.graph, before, aten.split_with_sizes.default, (value, sizes, 1), value, parts)


def _like(node: Node, size: tuple[int, ...]) -> torch.Tensor:
    made: torch.Tensor = node.meta["val"].new_empty(size)
    return made

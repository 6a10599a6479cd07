"""async_tp: products next to an exchange over tp run in chunks of rows, beside the exchange of the other chunks.

Consumes    a scheduled step graph.
Guarantees  where computation waits for an all-gather before products, or for a reduce-scatter or an all-reduce behind
            them, and chunks take less time by estimate, both run in chunks along the outermost dim: the exchange of a
            chunk is beside the products of another. As many elements are exchanged, in more collectives.
Leaves      transfers that are hidden already; values with fewer rows than two, or whose outermost dim is the sharded
            one; products of other kinds. All users of one gathered value share its chunks.
No-op       with async_tp=False; on graphs that exchange nothing over tp.

    g = all_gather(x, 1, "tp")         x0, x1 = split(x); g0 = all_gather(x0, 1, "tp"); g1 = all_gather(x1, 1, "tp")
    y = mm(view(g), w)          -->    y = cat(mm(view(g0), w), mm(view(g1), w))

    y = mm(a, w)                       a0, a1 = split(a); y0 = mm(a0, w); r0 = all_reduce(y0, "tp")
    r = all_reduce(y, "tp")     -->    y1 = mm(a1, w); r1 = all_reduce(y1, "tp")        # beside it: r0
                                       r = cat(r0, r1)

Chunks of the batch, as in Domino (Wang et al. 2024), rather than of the ranks: any number of them, on any backend.
With k chunks that take c seconds to compute and t to send, all take t + (k - 1) max(t, c) + c.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.cost.flops import TILE, node_seconds
from autopar.cost.graph_times import graph_times
from autopar.cost.hardware import Device, Links, device_of
from autopar.ir.graph import arguments, insert_call, is_call, nbytes, output_node, remove_dead_code, shape
from autopar.options import Options
from autopar.passes.step.schedule_collectives import ScheduleCollectives
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass

aten, ours = torch.ops.aten, torch.ops.autopar
COUNTS = (2, 4, 8)  # of chunks
PRODUCTS = (aten.mm.default, aten.addmm.default)
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
GAIN = 0.05  # of the exposed time, that chunks must save at least


class AsyncTensorParallel(Pass):
    """Splits exchanges over tp and the products next to them into chunks."""

    name = "async_tp"
    requires = ("step",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        options = ctx.plan.options if ctx.plan is not None else Options()
        found = [one for node in gm.graph.nodes if (one := _exchange(node))] if options.async_tp else []
        if not found:
            return gm
        device, links = device_of(options), Links.of(options, ctx.mesh)
        exposed = graph_times(gm, device, links).exposed
        changed = False
        for one in found:
            count = _count(one, exposed.get(one.node, 0.0), device, links, options.async_tp is True)
            if count:
                one.chunk(count)
                changed = True
        if not changed:
            return gm
        _sort(gm)
        remove_dead_code(gm)
        return ScheduleCollectives().apply(gm, ctx)


@dataclass(frozen=True)
class Exchange:
    """A collective, and the products that use its result, or whose sum it reduces, in order. rows: of its outermost
    dim. chunk: rewrites both in so many chunks."""

    node: Node
    products: Sequence[Node]
    rows: int
    chunk: Callable[[int], None]


def _exchange(node: Node) -> Exchange | None:
    """The collective over tp that a node is, if it and its products can run in chunks."""
    kinds = (ours.all_gather.default, ours.reduce_scatter.default, ours.all_reduce.default)
    if not is_call(node, *kinds) or arguments(node)["axis"] != "tp" or arguments(node).get("op", "sum") != "sum":
        return None
    value: Node = arguments(node)["x"]
    if len(shape(value)) < 2 or arguments(node).get("dim", 1) == 0:
        return None
    rows = shape(value)[0]
    if node.target is ours.all_gather.default:
        products = _products_of(node)
        return Exchange(node, products, rows, lambda count: _gather(node, products, count)) if products else None
    products = _addends(value, node)
    return Exchange(node, products, rows, lambda count: _reduce(node, products, count)) if products else None


def _products_of(gathered: Node) -> list[Node]:
    """The products whose rows are those of a gathered value."""
    width = shape(gathered)[-1]
    rows = gathered.meta["val"].numel() // width
    flat = [user for user in gathered.users if is_call(user, *VIEWS) and shape(user) == (rows, width)]
    found = {user for view in flat for user in view.users if is_call(user, *PRODUCTS) and _rows_of(user) is view}
    return [node for node in gathered.graph.nodes if node in found]


def _rows_of(product: Node) -> Any:
    """The factor whose rows are those of the result."""
    return product.args[0 if product.target is aten.mm.default else 1]


def _addends(value: Node, user: Node) -> list[Node]:
    """The products that a value is the sum of; none if it is the sum of others, or if somebody else uses one."""
    if list(value.users) != [user]:
        return []
    if is_call(value, *PRODUCTS):
        return [value]
    if is_call(value, *VIEWS):
        inner = value.args[0]
        assert isinstance(inner, Node)
        return _addends(inner, value) if inner.target in PRODUCTS and shape(value)[-1] == shape(inner)[-1] else []
    if is_call(value, aten.add.Tensor) and not value.kwargs:
        both = [x for x in value.args if isinstance(x, Node) and shape(x) == shape(value)]
        found = [_addends(x, value) for x in both]
        return [leaf for leaves in found for leaf in leaves] if len(found) == 2 and all(found) else []
    return []


# --- whether it pays ---------------------------------------------------------------------------------------


def _count(one: Exchange, exposed: float, device: Device, links: Links, always: bool) -> int:
    """How many chunks take the least time; 0 for none."""
    counts = [count for count in COUNTS if count <= one.rows]
    if not counts:
        return 0
    found = {count: _saved(one, count, exposed, device, links) for count in counts}
    best = max(found, key=found.__getitem__)
    return best if always or found[best] > GAIN * exposed else 0


def _saved(one: Exchange, count: int, exposed: float, device: Device, links: Links) -> float:
    """Seconds that chunks take less than the products after the exposed part of a transfer, or before it."""
    whole = sum(node_seconds(x, device) for x in one.products)
    own = sum(_of_chunk(x, count, device) for x in one.products)
    kind, axis = str(one.node.target).split(".")[1], arguments(one.node)["axis"]
    each = links.seconds(axis, kind, _sent(one.node, kind, links.mesh.size(axis)) / count)
    joined = [one.node] if kind != "all_gather" else one.products
    copied = 2 * sum(map(nbytes, joined)) / device.memory
    return exposed + whole - (each + (count - 1) * max(each, own) + own + copied)


def _of_chunk(product: Node, count: int, device: Device) -> float:
    """Seconds of a product of one of ``count`` chunks: whole tiles of fewer rows, but all of the weight."""
    rows = shape(product)[0]
    tiles = math.ceil(rows / count / TILE) / math.ceil(rows / TILE)
    weights = sum(nbytes(x) for x in product.all_input_nodes if x is not _rows_of(product))
    return max(node_seconds(product, device) * tiles, weights / device.memory) + device.launch


def _sent(node: Node, kind: str, ranks: int) -> float:
    whole = max(nbytes(node), nbytes(arguments(node)["x"]))
    return whole * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)


# --- chunks ------------------------------------------------------------------------------------------------


def _sizes(rows: int, count: int) -> list[int]:
    return [rows * (i + 1) // count - rows * i // count for i in range(count)]


def _split(before: Node, x: Node, sizes: list[int]) -> list[Node]:
    parts = insert_call(before, aten.split_with_sizes.default, (x, sizes, 0), like=x)
    return [insert_call(before, operator.getitem, (parts, i), like=x) for i in range(len(sizes))]


def _times(before: Node, product: Node, rows: Node) -> Node:
    """A product of some of the rows."""
    args = [rows if x is _rows_of(product) else x for x in product.args]
    return insert_call(before, product.target, args, like=product)  # type: ignore[arg-type]


def _gather(node: Node, products: Sequence[Node], count: int) -> None:
    """Gather and multiply some rows at a time; others use the whole, joined of the gathered chunks."""
    given = arguments(node)
    value: Node = given["x"]
    parts = _split(node, value, _sizes(shape(value)[0], count))
    chunks = [insert_call(node, node.target, (x, *node.args[1:]), like=node) for x in parts]  # type: ignore[arg-type]
    at = products[-1]
    flat = [insert_call(at, aten.reshape.default, (chunk, [-1, shape(value)[-1]]), like=node) for chunk in chunks]
    made = [[_times(at, product, rows) for product in products] for rows in flat]
    for product, results in zip(products, zip(*made, strict=True), strict=True):
        product.replace_all_uses_with(insert_call(at, aten.cat.default, ([*results], 0), like=product))
    node.replace_all_uses_with(insert_call(at, aten.cat.default, (chunks, 0), like=node))


def _reduce(node: Node, products: Sequence[Node], count: int) -> None:
    """Multiply and reduce some rows at a time."""
    value: Node = arguments(node)["x"]
    sizes = _sizes(shape(value)[0], count)
    inner = value.meta["val"].numel() // shape(value)[0] // shape(value)[-1]
    rows = [_split(node, _rows_of(product), [size * inner for size in sizes]) for product in products]
    reduced = []
    for i, size in enumerate(sizes):
        total = None
        for product, parts in zip(products, rows, strict=True):
            made = _times(node, product, parts[i])
            part = insert_call(node, aten.view.default, (made, [size, *shape(value)[1:]]), like=product)
            total = part if total is None else insert_call(node, aten.add.Tensor, (total, part), like=product)
        reduced.append(insert_call(node, node.target, (total, *node.args[1:]), like=node))  # type: ignore[arg-type]
    node.replace_all_uses_with(insert_call(node, aten.cat.default, (reduced, 0), like=node))


def _sort(gm: GraphModule) -> None:
    """Every call behind its operands, else in the order as it is."""
    calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    place = {node: i for i, node in enumerate(calls)}
    left = {node: sum(x in place for x in node.all_input_nodes) for node in calls}
    ready, end = [place[node] for node in calls if not left[node]], output_node(gm)
    heapq.heapify(ready)
    while ready:
        node = calls[heapq.heappop(ready)]
        end.prepend(node)
        for user in node.users:
            if user in place:
                left[user] -= 1
                if not left[user]:
                    heapq.heappush(ready, place[user])

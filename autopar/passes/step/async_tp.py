"""async_tp: what is next to an exchange over tp runs in chunks of rows, beside the exchange of the other chunks.

Consumes    a scheduled step graph.
Guarantees  where computation waits for an exchange of activations, and chunks take less time by estimate, the exchange,
            the products before a reduction, and what leads from the result to the next products (sums, norms, the
            all-gather behind a reduce-scatter) run in chunks along the outermost dim: the exchange of a chunk is beside
            the computation of others. As many elements are exchanged, in more collectives.
Leaves      transfers that are hidden already; values with fewer rows than two, or whose outermost dim is the sharded
            one; calls that mix rows. What others use of a region is joined.
No-op       with async_tp=False; on graphs that exchange nothing over tp.

    y = mm(a, w)                       a0, a1 = split(a); y0 = mm(a0, w); r0 = all_reduce(y0, "tp")
    r = all_reduce(y, "tp")            y1 = mm(a1, w); r1 = all_reduce(y1, "tp")        # beside it: r0
    h = r + x                   -->    x0, x1 = split(x); h0 = r0 + x0; z0 = mm(h0, v)  # beside it: r1
    z = mm(h, v)                       h1 = r1 + x1; z1 = mm(h1, v)
                                       h = cat(h0, h1); z = cat(z0, z1)

Chunks of the batch, as in Domino (Wang et al. 2024), rather than of the ranks: any number of them, on any backend. With
k chunks that take b seconds to compute before the exchange, t to send and c to compute behind it, all take the longest
of: k b + t + c, b + k t + c, b + t + k c, and k (b + c).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from torch.fx import GraphModule, Node

from autopar.cost.flops import TILE, node_seconds
from autopar.cost.graph_times import graph_times
from autopar.cost.hardware import Device, Links, device_of
from autopar.ir.graph import arguments, is_call, nbytes, output_node, remove_dead_code, shape
from autopar.options import Options
from autopar.passes.step.row_regions import PRODUCTS, RowRegion, exchanges_rows, row_operands, row_region, run_in_chunks
from autopar.passes.step.schedule_collectives import ScheduleCollectives
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass

COUNTS = (2, 4, 8)  # of chunks
GAIN = 0.05  # of the exposed time, that chunks must save at least


class AsyncTensorParallel(Pass):
    """Splits exchanges over tp and what is next to them into chunks."""

    name = "async_tp"
    requires = ("step",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        options = ctx.plan.options if ctx.plan is not None else Options()
        found = [node for node in gm.graph.nodes if exchanges_rows(node)] if options.async_tp else []
        if not found:
            return gm
        prices = _Prices(gm, device_of(options), Links.of(options, ctx.mesh))
        chunked = set[Node]()
        for node in found:
            if node in chunked or not (options.async_tp is True or prices.exposed.get(node)):
                continue
            best = prices.best(node, least=-math.inf if options.async_tp is True else GAIN)
            if best is not None:
                chunked.update(best[0].exchanges)
                run_in_chunks(*best)
        if not chunked:
            return gm
        _sort(gm)
        remove_dead_code(gm)
        return ScheduleCollectives().apply(gm, ctx)


class _Prices:
    """Seconds that chunks save."""

    def __init__(self, gm: GraphModule, device: Device, links: Links) -> None:
        self.device, self.links = device, links
        self.exposed = graph_times(gm, device, links).exposed

    def best(self, exchange: Node, least: float) -> tuple[RowRegion, int] | None:
        """The region of an exchange and the number of its chunks that save most; None where that is less than a share
        of what is exposed."""
        regions = [row_region(exchange), row_region(exchange, whole=False)]
        every = [(one, count) for one in regions if one is not None for count in COUNTS if count <= one.rows]
        saved = {(i, count): self._saved(one, count) for i, (one, count) in enumerate(every)}
        if not saved:
            return None
        which = max(saved, key=saved.__getitem__)
        chosen = every[which[0]]
        return chosen if saved[which] > least * self._exposed(chosen[0]) else None

    def _exposed(self, region: RowRegion) -> float:
        return sum(self.exposed.get(node, 0.0) for node in region.exchanges)

    def _saved(self, region: RowRegion, count: int) -> float:
        before, behind = (self._of_chunk(calls, count) for calls in (region.before, region.behind))
        sent = sum(self._of_transfer(node, count) for node in region.exchanges)
        chunks = max(
            count * before + sent + behind, before + count * sent + behind, before + sent + count * behind,
            count * (before + behind),
        )  # fmt: skip
        whole = sum(node_seconds(node, self.device) for node in region.calls)
        copied = 2 * sum(map(nbytes, region.made)) / self.device.memory
        return self._exposed(region) + whole - chunks - copied

    def _of_chunk(self, calls: Iterable[Node], count: int) -> float:
        """Seconds of one of ``count`` chunks: products of whole tiles of fewer rows, but all of the weight."""
        found = 0.0
        for node in calls:
            seconds = node_seconds(node, self.device)
            if is_call(node, *PRODUCTS):
                rows = shape(node)[0]
                tiles = math.ceil(rows / count / TILE) / math.ceil(rows / TILE)
                weights = sum(nbytes(x) for x in set(node.all_input_nodes) - set(row_operands(node, 1) or ()))
                found += max(seconds * tiles, weights / self.device.memory) + self.device.launch
            elif seconds:
                found += max(seconds / count, self.device.launch)
        return found

    def _of_transfer(self, node: Node, count: int) -> float:
        kind, axis = str(node.target).split(".")[1], arguments(node)["axis"]
        whole, ranks = max(nbytes(node), nbytes(arguments(node)["x"])), self.links.mesh.size(axis)
        sent = whole * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
        return self.links.seconds(axis, kind, sent / count)


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

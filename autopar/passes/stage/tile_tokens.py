"""tile_tokens: regions that compute every token by itself run tile by tile, forward and backward.

Consumes    a local graph, and its regions (`autopar.passes.stage.tile_regions`).
Guarantees  the same values, tile after tile. The nodes of a tile are marked (``tile``): F saves none of them, and the
            backward computes what it needs of a tile again right before it uses it, so F and B have the inner values of
            one tile in memory. Gradients of weights are added up in place over the tiles (`sum_products`), in another
            order of sums than that of the whole region; dropout draws the same numbers.
Leaves      all exchanges, and regions in which tokens meet.

    g = linear(x, w1); y = linear(silu(g), w2)
        -->
    x0, x1 = split(x, [32, 32], 1)
    g0 = linear(x0, w1); y0 = linear(silu(g0), w2)
    g1 = linear(x1, w1); y1 = linear(silu(g1), w2)
    y = cat([y0, y1], 1)

Source of the idea: TiledMLP and tiled losses of Arctic Long Sequence Training (Bekman et al. 2025, arXiv 2506.13996),
which wraps modules by name; here regions are found by the rules of the operators.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from autopar.ir.graph import arguments, insert_call, run_fake, set_argument
from autopar.ir.meta import TYPES, inherit
from autopar.ops.traits import SIZED
from autopar.passes.stage.tile_regions import DRAWS, TileRegion, tile_sizes

aten = torch.ops.aten


def tile_tokens(gm: GraphModule, region: TileRegion, count: int) -> None:
    """Compute a region in ``count`` tiles, or in one tile per token if it has fewer."""
    _Tiles(gm, region, tile_sizes(region.tokens, count)).rewrite()


class _Tiles:
    def __init__(self, gm: GraphModule, region: TileRegion, sizes: Sequence[int]) -> None:
        self.gm, self.region, self.sizes = gm, region, sizes
        self.first, self.last = region.calls[0], region.calls[-1]
        self.values: dict[tuple[Node, int], Any] = {}  # (call, tokens) -> its value

    def rewrite(self) -> None:
        region = self.region
        self._move_users()
        pieces = {x: self._split(x, region.dims[x]) for x in region.given}
        made: dict[Node, list[Node]] = {x: [] for x in region.made}
        start = 0
        for number, size in enumerate(self.sizes, 1):
            copies = {x: pieces[x][number - 1] for x in region.given}
            for call in region.calls:
                copies[call] = self._copy(call, copies, number, start, size)
            for x, found in made.items():
                found.append(copies[x])
            start += size
        inside = set(region.calls)
        for x, found in made.items():
            joined = insert_call(self.last, aten.cat.default, (found, region.dims[x]), like=x, val=x.meta["val"])
            inherit(joined, x, (*TYPES, "has_gradient"))
            joined.meta.pop("tile", None)
            x.replace_all_uses_with(joined, delete_user_cb=lambda user: user not in inside)
        for call in reversed(region.calls):
            self.gm.graph.erase_node(call)
        self.gm.recompile()

    def _move_users(self) -> None:
        """Calls among those of the region that use its values follow it."""
        inside, behind = set(self.region.calls), set[Node]()
        node, at = self.first, self.last
        while node is not self.last:
            following = node.next
            if node not in inside and any(x in inside or x in behind for x in node.all_input_nodes):
                behind.add(node)
                at.append(node)
                at = node
            node = following

    def _split(self, x: Node, dim: int) -> list[Node]:
        sizes = [self._rows(x, size) for size in self.sizes]
        parts = insert_call(self.last, aten.split_with_sizes.default, (x, sizes, dim), like=self.last)
        return [self._note(insert_call(self.last, operator.getitem, (parts, i)), x) for i in range(len(self.sizes))]

    def _copy(self, call: Node, copies: dict[Node, Node], number: int, start: int, size: int) -> Node:
        args, kwargs = map_arg((call.args, call.kwargs), lambda n: copies.get(n, n))
        index = self._index(call, start, size) if call.target in DRAWS else None
        made = insert_call(self.last, call.target, args, kwargs, like=call, val=call.meta["val"])  # type: ignore[arg-type]
        made.meta["tile"] = number
        if call.target in SIZED:
            set_argument(made, SIZED[call.target], self._shape(call, size))
        if index is not None:
            set_argument(made, "index", index)
        if (call, size) not in self.values:
            self.values[call, size] = run_fake(made.graph, made.target, made.args, made.kwargs)  # type: ignore[arg-type]
        made.meta["val"] = self.values[call, size]
        return self._note(made, call)

    def _shape(self, call: Node, size: int) -> list[int]:
        shape = list(call.meta["val"].shape)
        shape[self.region.dims[call]] = self._rows(call, size)
        return shape

    def _rows(self, x: Node, size: int) -> int:
        """Rows of a value for so many tokens."""
        return size * x.meta["val"].shape[self.region.dims[x]] // self.region.tokens

    def _index(self, call: Node, start: int, size: int) -> list[Node]:
        """The global indices of the elements of a tile."""
        known, device = arguments(call)["index"], arguments(call)["seed"].meta["val"].device
        shape = call.meta["val"].shape
        index = list(known) or [insert_call(self.last, aten.arange.default, (n,), {"device": device}) for n in shape]
        dim = self.region.dims[call]
        rows = self._rows(call, start), self._rows(call, size)
        index[dim] = insert_call(self.last, aten.narrow.default, (index[dim], 0, *rows))
        return index

    def _note(self, node: Node, like: Node) -> Node:
        inherit(node, like, ("placements", "result_placements", "derived", "global_groups", "has_gradient"))
        return node

"""merge_all_reduces: one sum over replicas and the ranks they are copies of.

Consumes    a step graph.
Guarantees  an all-reduce over dp whose result does nothing but be all-reduced over dp_replicate is one over both: for n
            and r ranks it moves 2 (nr - 1)/nr of the value, and not 2 (n - 1)/n + 2 (r - 1)/r.
Leaves      sums of pieces over dp_replicate, behind a reduce-scatter; sums over other axes, whose links are others.

    a = all_reduce(x, "dp"); b = all_reduce(a, "dp_replicate")    -->    b = all_reduce(x, "dp_replicate,dp")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import arguments, is_call, set_argument
from autopar.ir.mesh import DATA
from autopar.rewrite.compilation import Compilation


@dataclass(frozen=True)
class MergeAllReduces:
    """See the module's docstring."""

    name: ClassVar[str] = "merge_all_reduces"
    requires: ClassVar[tuple[str, ...]] = ("step",)
    ensures: ClassVar[tuple[str, ...]] = ()

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        order = list(ctx.mesh.sizes)
        for node in list(gm.graph.nodes):
            inner = _inner(node)
            if inner is not None:
                axes = {arguments(node)["axis"], arguments(inner)["axis"]}
                set_argument(node, "axis", ",".join(sorted(axes, key=order.index)))
                set_argument(node, "x", arguments(inner)["x"])
                gm.graph.erase_node(inner)
        gm.recompile()
        return gm


def _inner(node: Node) -> Node | None:
    """The sum over one axis of the data that a sum over the other takes, and nobody else."""
    if not _sums_data(node):
        return None
    x = arguments(node)["x"]
    joins = _sums_data(x) and list(x.users) == [node] and arguments(x)["axis"] != arguments(node)["axis"]
    return x if joins else None


def _sums_data(node: object) -> bool:
    if not isinstance(node, Node) or not is_call(node, torch.ops.autopar.all_reduce.default):
        return False
    given = arguments(node)
    return given["axis"] in DATA and given["op"] == "sum"

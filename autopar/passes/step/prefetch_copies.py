"""prefetch_copies: start copies from host memory one layer ahead of their use.

Consumes    a backward whose copies from host memory stand right before their first use.
Guarantees  every copy of a layer's values starts where the layer before it (in execution order) first uses a value of
            its own, so that it overlaps one layer; at most two layers of values that come back are alive.
Leaves      copies to the host, which start right behind what they copy; the order of copies.

    a1 = from_host(h1); y = mm(a1, g); a2 = from_host(h2); z = mm(a2, y)
        -->
    a1 = from_host(h1); a2 = from_host(h2); y = mm(a1, g); z = mm(a2, y)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import is_call, layer_of
from autopar.rewrite.compilation import Compilation


@dataclass(frozen=True)
class PrefetchCopies:
    """Moves copies from the host up by one layer."""

    name: ClassVar[str] = "prefetch_copies"
    requires: ClassVar[tuple[str, ...]] = ("step",)
    ensures: ClassVar[tuple[str, ...]] = ()

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        place = {node: i for i, node in enumerate(gm.graph.nodes)}
        copies = [node for node in gm.graph.nodes if is_call(node, torch.ops.autopar.from_host.default)]
        layers = [list(group) for _, group in itertools.groupby(copies, layer_of)]
        uses: list[Node] = [min((u for x in layer for u in x.users), key=place.__getitem__) for layer in layers]
        for before, layer in zip(uses, layers[1:]):
            for node in layer:
                before.prepend(node)
        gm.recompile()
        return gm

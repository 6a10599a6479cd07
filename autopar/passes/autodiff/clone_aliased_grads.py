"""clone_aliased_grads: every gradient that leaves a step is alone in its storage.

Consumes    a step graph; ``meta["owned"]`` says which of its outputs are written to: gradients, which sums over
            microbatches, clipping and optimizers change in place.
Guarantees  each of these has contiguous storage that is no input, no part of something larger, and no other output's.
Leaves      gradients that are so already (nearly all); outputs that nobody writes to.

    g = all_reduce(d, "dp"); return g, t(g)    -->    return g, clone(t(g))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import insert_call, output_node, outputs
from autopar.ir.storages import shared_outputs
from autopar.rewrite.compilation import Compilation

aten = torch.ops.aten


@dataclass(frozen=True)
class CloneAliasedGrads:
    """See the module's docstring."""

    name: ClassVar[str] = "clone_aliased_grads"
    requires: ClassVar[tuple[str, ...]] = ("step",)
    ensures: ClassVar[tuple[str, ...]] = ("owned",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        clone_aliased_grads(gm)
        return gm


def clone_aliased_grads(gm: GraphModule) -> None:
    """Clone the outputs in ``meta["owned"]`` that share their storage."""
    end, values, how = output_node(gm), outputs(gm), {"memory_format": torch.contiguous_format}
    for i in shared_outputs(gm, gm.meta.get("owned", ())):
        value = values[i]
        assert isinstance(value, Node)
        values[i] = insert_call(end, aten.clone.default, (value,), how, like=value)
    end.args = (tuple(values),)
    gm.recompile()

"""clone_aliased_grads: every gradient that leaves a step has a storage of its own.

Consumes    a step graph; ``meta["owned"]`` lists the outputs that are written in place: gradients, which accumulation
            over microbatches, clipping and optimizers change.
Guarantees  each of these is contiguous, and shares its storage with no input, no larger tensor and no other output.
Leaves      gradients for which this holds already (nearly all); outputs that are never written to.

    g = all_reduce(d, "dp"); return g, t(g)    -->    return g, clone(t(g))
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import insert_call, output_node, outputs
from autopar.ir.storages import shared_outputs
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass

aten = torch.ops.aten


class CloneAliasedGrads(Pass):
    """See the module's docstring."""

    name = "clone_aliased_grads"
    requires = ("step",)
    ensures = ("owned",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        clone_aliased_grads(gm)
        return gm


def clone_aliased_grads(gm: GraphModule) -> None:
    """Clone the outputs in ``meta["owned"]`` whose storage is shared."""
    end, values, how = output_node(gm), outputs(gm), {"memory_format": torch.contiguous_format}
    for i in shared_outputs(gm, gm.meta.get("owned", ())):
        value = values[i]
        assert isinstance(value, Node)
        values[i] = insert_call(end, aten.clone.default, (value,), how, like=value)
    end.args = (tuple(values),)
    gm.recompile()

"""cast_parameters: parameters that are stored in a different dtype than they are used in.

Consumes    a captured graph whose ``meta["stored_dtypes"]`` has the dtype in which each parameter is stored.
Guarantees  the placeholder of such a parameter has the stored dtype and is cast right before its first use. The stored
            parameter is what gradients are taken of, so they flow back through the cast.
Leaves      other casts; the position of the cast among collectives (`propagate_placements` gives it the placement of
            the parameter, so a shard is cast before it is gathered).

    linear(x, w: bfloat16)    -->    w: float32; w_c = _to_copy(w, dtype=bfloat16); linear(x, w_c)
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from autopar.ir.graph import insert_call, placeholders
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass

aten = torch.ops.aten


class CastParameters(Pass):
    """See the module's docstring."""

    name = "cast_parameters"
    requires = ("functional",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        stored = gm.meta.pop("stored_dtypes", {})
        order = {node: i for i, node in enumerate(gm.graph.nodes)}
        for node in placeholders(gm):
            val = node.meta["val"]
            held = stored.get(node.name)
            if held is None or held == val.dtype:
                continue
            node.meta["val"] = val.to(held)
            users = [user for user in node.users if user in order]
            if users:
                first = min(users, key=order.__getitem__)
                cast = insert_call(
                    first, aten._to_copy.default, (node,), {"dtype": val.dtype}, val=val, name=f"{node.name}_cast"
                )
                node.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)  # type: ignore[misc]
        gm.recompile()
        return gm

"""simplify_views: drop the views that tracing leaves behind.

Consumes    a step graph.
Guarantees  no view that changes nothing (same shape, detach, alias) feeds another op; a view of a view of a
            contiguous value is one view.
Leaves      views that are outputs; every number.

    a = view(w, [32]); b = detach(a); y = mul(b, x)            -->    y = mul(w, x)
    a = view(x, [64, 32]); b = view(a, [4, 16, 32])            -->    b = view(x, [4, 16, 32])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import is_call, remove_dead_code
from autopar.ops.traits import PASSING, is_view
from autopar.rewrite.checks import ALIASES
from autopar.rewrite.compilation import Compilation

aten = torch.ops.aten


@dataclass(frozen=True)
class SimplifyViews:
    """Removes views without effect and joins chains of views."""

    name: ClassVar[str] = "simplify_views"
    requires: ClassVar[tuple[str, ...]] = ("step",)
    ensures: ClassVar[tuple[str, ...]] = ("plain",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        for node in list(gm.graph.nodes):
            if _changes_nothing(node):
                _bypass(node)
            elif is_call(node, aten.view.default) and is_call(
                node.args[0], aten.view.default, aten._unsafe_view.default
            ):
                base = node.args[0].args[0]
                if isinstance(base, Node) and base.meta["val"].is_contiguous():
                    node.update_arg(0, base)
        remove_dead_code(gm)
        gm.recompile()
        return gm


def _changes_nothing(node: Node) -> bool:
    if is_call(node, *ALIASES):
        return True
    if node.target not in PASSING or not is_view(node.target):
        return False
    source, result = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return bool(source.shape == result.shape and source.stride() == result.stride())


def _bypass(node: Node) -> None:
    """Let every user but the output use the operand: an output has storage of its own, as a new result has."""
    operand = node.args[0]
    assert isinstance(operand, Node)
    node.replace_all_uses_with(operand, delete_user_cb=lambda user: user.op != "output")

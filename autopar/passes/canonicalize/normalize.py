"""normalize: one canonical form per operation, and no in-place operators.

Consumes    the captured graph: flat, functional, with shapes of the global batch.
Guarantees  `linear` for every dense projection, on unflattened values; `matmul` for every other product; `reshape` for
            every change of shape; `split_with_sizes` for every split; `autopar::attention`, `autopar::cross_entropy`
            and `autopar::dropout` for what they name; `autopar::random` for other random operators; losses and batch
            norm as sums and pointwise operators.
Leaves      operators without a rewrite, all names of inputs and outputs, and the numbers: the graph runs in one process
            and returns what the model returns.
No-op       on a canonical graph.

    view = view(x, [8, 32]); addmm = addmm(b, view, w); out = view(addmm, [2, 4, 96])
        --> out = linear(x, t(w), b)
    a = slice(x, 1, 0, 4); b = slice(x, 1, 4, 8) --> a, b = split_with_sizes(x, [4, 4], 1)
    loss = cross_entropy_loss(x, t) --> loss = div(sum(cross_entropy(x, t, -100, 0.0)[0]), sum(ne(t, -100)))
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import mark_gradients, placeholders, remove_dead_code
from autopar.ir.meta import input_specs
from autopar.passes.canonicalize import (
    attention_calls,
    attention_pieces,
    bags,
    canonical_ops,
    flat_rows,
    losses,
    norms,
    per_example_index,
    products,
    shapes,
)
from autopar.passes.canonicalize.canonical_ops import take_apart
from autopar.passes.canonicalize.functionalize_rng import hold_unused_draws, number_draws, release_draws
from autopar.passes.canonicalize.match_sdpa import match_sdpa
from autopar.rewrite.build import Build, Rewrite
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass

REWRITES: dict[Any, Rewrite] = {
    **shapes.TABLE,
    **products.TABLE,
    **losses.TABLE,
    **norms.TABLE,
    **attention_calls.TABLE,
    **flat_rows.TABLE,
    **bags.TABLE,
    **per_example_index.TABLE,
    **canonical_ops.TABLE,
}

_MOST_SWEEPS = 20  # each sweep makes progress; graphs settle in 3 or 4


class Normalize(Pass):
    """See the module's docstring."""

    name = "normalize"
    ensures = ("functional",)

    def apply(self, gm: GraphModule, ctx: Compilation | None = None) -> GraphModule:
        specs = input_specs(gm)
        for node in placeholders(gm):
            node.meta["kind"] = specs[node.name].kind
            if specs[node.name].kind == "constant":
                node.meta["value"] = gm.meta["constants"][specs[node.name].name]
        trainable = [name for name, spec in specs.items() if spec.requires_grad]
        unused = hold_unused_draws(gm)
        _to_fixpoint(gm, trainable, canonical_ops.STRIDED)  # while strides are those of the model
        take_apart(gm, REWRITES)
        _to_fixpoint(gm, trainable, REWRITES)
        _to_fixpoint(gm, trainable, {torch.ops.aten.matmul.default: match_sdpa})
        shapes.slices_to_split(gm.graph)
        _to_fixpoint(gm, trainable, attention_pieces.TABLE)
        number_draws(gm)
        release_draws(gm, unused)
        for node in placeholders(gm):
            node.meta.pop("value", None)
        remove_dead_code(gm)
        gm.graph.lint()
        gm.recompile()
        return gm


def _to_fixpoint(gm: GraphModule, trainable: list[str], table: dict[Any, Rewrite]) -> None:
    for _ in range(_MOST_SWEEPS):
        mark_gradients(gm, trainable)
        changed = [_rewrite(gm, node, table) for node in list(gm.graph.nodes)]
        remove_dead_code(gm)
        if not any(changed):
            return
    raise AssertionError("normalize: the rewrites reach no fixpoint")


def _rewrite(gm: GraphModule, node: Node, table: dict[Any, Rewrite]) -> bool:
    rewrite = table.get(node.target) if node.op == "call_function" and node.users else None
    if rewrite is None:
        return False
    before = len(gm.graph.nodes)
    new = rewrite(node, Build(node))
    if new is None:
        return len(gm.graph.nodes) != before
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
    return True


__all__ = ["REWRITES", "Normalize"]

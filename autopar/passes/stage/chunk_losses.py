"""chunk_losses: logits and losses of a few rows at a time, so that the logits of all tokens never exist at once.

Consumes    a local graph whose per-row losses (`autopar.cross_entropy`, with a full or a sharded vocabulary) come from
            a product with a weight, through operators that treat every row alike.
Guarantees  the same losses, from chunks of rows, in order. The nodes that compute a chunk's logits are marked
            (``chunk``): F computes their gradient at once (`fused_loss_backward`), or the backward recomputes them
            right before it uses them, so that F and B have the logits of one chunk in memory.
Leaves      a head whose logits have other users, and losses whose log-sum-exp is used.

    x = linear(h, w); l = cross_entropy(reshape(x, [64, V]), t)
        -->
    h0, h1 = split(reshape(h, [64, H]), 32); t0, t1 = split(t, 32)
    l = cat(cross_entropy(linear(h0, w), t0), cross_entropy(linear(h1, w), t1))

Heads are found by dataflow, with any number of casts, scales, caps and biases in between. With a sharded vocabulary,
the all-reduce over ranks (Megatron-LM, section 3) becomes one per chunk. Source of the idea: Liger Kernel (Hsu et al.
2024, section 3.2).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.adapters.operators import OpOverload
from autopar.ir.conversions import conversion_of, is_conversion
from autopar.ir.graph import insert_call, is_call, remove_dead_code
from autopar.ir.meta import TYPES, inherit
from autopar.ir.placement import Partial, Shard
from autopar.ops.traits import is_elementwise
from autopar.ops.vocab_parallel import cross_entropy_of_piece

aten = torch.ops.aten
LOSSES = (torch.ops.autopar.cross_entropy.default, cross_entropy_of_piece)
_MERGES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


@dataclass
class Head:
    """A product with a weight and a loss of its rows. between: the operators applied to every logit, in order, except
    those that join the rows of several sequences."""

    product: Node
    loss: Node
    between: list[Node] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """The number of rows on this rank."""
        return math.prod(self.product.meta["val"].shape[:-1])

    @property
    def logit_bytes(self) -> int:
        """Bytes of one row of logits, in the dtype that losses are computed in."""
        logits = self.loss.args[0].meta["val"]  # type: ignore[union-attr]
        return logits.shape[-1] * max(logits.dtype.itemsize, torch.float32.itemsize)


def heads(gm: GraphModule) -> list[Head]:
    """Heads that may be computed in chunks."""
    found = [_head(node) for node in gm.graph.nodes if is_call(node, *LOSSES)]
    return [head for head in found if head is not None and head.rows > 1]


def pending_logits(gm: GraphModule) -> tuple[int, str, int] | None:
    """(classes, axis, its size) of a loss whose logits are partial on an axis, since a weight is sharded on its
    contracted dim; None if there is none."""
    for loss in gm.graph.nodes:
        x: Any = loss.args[0] if is_call(loss, *LOSSES) else None
        while isinstance(x, Node) and x.op == "call_function" and len(x.users) == 1:
            if is_conversion(x):
                axis, source, _ = conversion_of(x)
                return (x.meta["val"].shape[-1], axis, x.args[2]) if isinstance(source, Partial) else None  # type: ignore[return-value]
            x = x.args[0] if is_call(x, *_MERGES) else _logits_of(x)
    return None


def chunk_losses(gm: GraphModule, head: Head, rows: int) -> None:
    """Compute a head ``rows`` rows at a time."""
    given, weights = head.product.args[0], head.product.args[1:]
    assert isinstance(given, Node)
    hidden = _rows_of(given, head)
    sizes = [min(rows, head.rows - start) for start in range(0, head.rows, rows)]
    pieces = [_split(x, sizes, head.loss) for x in (hidden, head.loss.args[1])]
    made = []
    for number, (h, target) in enumerate(zip(*pieces, strict=True), 1):
        made.append(_chunk(head, h, target, weights, number))
    losses = next(user for user in head.loss.users)
    joined = insert_call(losses, aten.cat.default, (made,), like=losses)
    inherit(joined, losses, (*TYPES, "has_gradient"))
    losses.replace_all_uses_with(joined)
    remove_dead_code(gm)
    gm.recompile()


def _head(loss: Node) -> Head | None:
    if any(user.args[1] != 0 for user in loss.users):  # the log-sum-exp is used
        return None
    between: list[Node] = []
    x: Any = loss.args[0]
    while isinstance(x, Node) and x.op == "call_function" and len(x.users) == 1:
        if is_call(x, aten.linear.default):
            return Head(x, loss, between[::-1])
        if is_call(x, *_MERGES) and x.meta["val"].shape[-1] == x.args[0].meta["val"].shape[-1]:  # type: ignore[union-attr]
            x = x.args[0]
            continue
        operand = _logits_of(x)
        if operand is None:
            return None
        between.append(x)
        x = operand
    return None


def _logits_of(x: Node) -> Node | None:
    """The operand that each logit of the result comes from, if all others are the same for every row."""
    if not isinstance(x.target, OpOverload) or not is_elementwise(x.target):
        return None
    shape = x.meta["val"].shape
    same = [n for n in x.all_input_nodes if n.meta["val"].shape == shape and shape.numel() > shape[-1]]
    others = [n for n in x.all_input_nodes if n not in same]
    if len(same) != 1 or any(n.meta["val"].numel() > shape[-1] or n.meta["val"].dim() > 1 for n in others):
        return None
    return same[0]


def _rows_of(x: Node, head: Head) -> Node:
    """[B, T, H] as [rows, H]."""
    val = x.meta["val"]
    if val.dim() == 2:
        return x
    flat = insert_call(head.product, aten.reshape.default, (x, [head.rows, val.shape[-1]]), like=head.product)
    logits: Any = head.loss.args[0]
    cut = {axis: p for axis, p in logits.meta.get("placements", {}).items() if isinstance(p, Shard) and p.dim == 0}
    kept = {axis: p for axis, p in x.meta.get("placements", {}).items() if not isinstance(p, Shard)}
    _note(flat, {**kept, **cut}, x)
    return flat


def _split(x: Any, sizes: Sequence[int], before: Node) -> list[Node]:
    parts = insert_call(before, aten.split_with_sizes.default, (x, list(sizes)), like=before)
    found = []
    for i in range(len(sizes)):
        piece = insert_call(before, operator.getitem, (parts, i), like=before)
        _note(piece, x.meta.get("placements", {}), x)
        found.append(piece)
    return found


def _chunk(head: Head, h: Node, target: Node, weights: Sequence[Any], number: int) -> Node:
    def call(like: Node, args: Sequence[Any], kwargs: Any) -> Node:
        made = insert_call(head.loss, like.target, args, kwargs, like=like)  # type: ignore[arg-type]
        made.meta["chunk"] = number
        return made

    x = call(head.product, (h, *weights), head.product.kwargs)
    logits: Any = head.loss.args[0]
    _note(x, logits.meta.get("placements", {}), head.product)
    for old in head.between:
        source = _logits_of(old)
        x = call(old, [x if a is source else a for a in old.args], old.kwargs)
        _note(x, logits.meta.get("placements", {}), old)
    loss = insert_call(head.loss, head.loss.target, (x, target, *head.loss.args[2:]), head.loss.kwargs, like=head.loss)  # type: ignore[arg-type]
    entry = insert_call(head.loss, operator.getitem, (loss, 0), like=head.loss)
    _note(entry, next(iter(head.loss.users)).meta.get("placements", {}), head.loss)
    return entry


def _note(node: Node, placements: Any, like: Node) -> None:
    node.meta["placements"] = dict(placements)
    node.meta["has_gradient"] = like.meta.get("has_gradient", False)

"""slice_tokens: from a graph with placements on "sl" to the graph that runs one token slice.

Consumes    a local graph with placements, of the tokens [c, c + l) (`place_token_slices`, `lower_to_local`).
Guarantees  no conversion over "sl" is left. A replicated value is narrowed to the slice's rows; keys and values of
            causal attention come from a cache: an input ``past_..`` with the c keys of earlier slices, and an output
            with the slice's own l. Nodes that depend on the slice but on no parameter are marked (`of_slice`): no
            prologue may compute them.
Leaves      graphs without slices, and values that are known before the first slice: they stay unsliced.

    cos_s = exchange_slice(cos, ..., "I", "S(1)")   -->   cos_s = narrow(cos, 1, c, l)
    k_r = exchange_slice(k, ..., "S(2)", "R")       -->   own = clone(k); k_r = extend(past_k, own, 2)
    y = attention(q, k_r, v_r, key_mask, offset=c)  -->   y = attention(q, k_r, v_r, narrow(key_mask, 1, 0, c + l), ...)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.ir.conversions import conversion_of, exchange_slice, is_conversion
from autopar.ir.graph import (
    add_placeholder,
    arguments,
    insert_call,
    is_call,
    output_node,
    placeholders,
    remove_dead_code,
    run_fake,
    set_argument,
    tensor_operands,
)
from autopar.ir.mesh import TokenSlice
from autopar.ir.meta import ORIGIN, TYPES, extend_signature, inherit, signature_of
from autopar.ir.placement import Partial, Shard, parse_placement
from autopar.ir.signature import InputSpec, OutputSpec
from autopar.rewrite.compilation import Compilation
from autopar.steps.graphs import Cache

aten = torch.ops.aten
_ATTENTION = torch.ops.autopar.attention.default


def slice_tokens(gm: GraphModule, ctx: Compilation) -> tuple[GraphModule, list[Cache]]:
    """Remove the axis "sl" from a local graph. The caches are placeholders and outputs of the graph, by name."""
    if ctx.mesh.slice is None:
        return gm, []
    slicer = _Slicer(gm, ctx.mesh.slice)
    for node in list(gm.graph.nodes):
        if is_call(node, exchange_slice):
            slicer.convert(node)
        elif is_call(node, _ATTENTION):
            slicer.attend(node)
    slicer.finish()
    remove_dead_code(gm)
    gm.recompile()
    return gm, slicer.caches


def of_slice(node: Node) -> bool:
    """Whether the node is a slice's rows of a value that depends on no parameter."""
    return bool(node.meta.get("of_slice", False))


class _Slicer:
    def __init__(self, gm: GraphModule, part: TokenSlice) -> None:
        self.gm, self.slice = gm, part
        self.caches: list[Cache] = []
        self.known: set[Node] = set()  # rows of this and earlier slices of a full value
        self.specs = {s.node: s.kind for s in signature_of(gm).inputs}
        self.free: set[Node] = set()
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                made = self.specs[node.name] == "parameter"
            else:
                made = any(x not in self.free for x in tensor_operands(node))
            if not made:
                self.free.add(node)

    def finish(self) -> None:
        """Caches become inputs and outputs of the signature; users of a slice's rows are marked as well."""
        for node in self.gm.graph.nodes:
            if node in self.free and any(of_slice(x) for x in node.all_input_nodes):
                node.meta["of_slice"] = True
        past = [InputSpec(c.past, "past", c.past) for c in self.caches]
        extend_signature(self.gm, past, [OutputSpec("own", c.own) for c in self.caches])
        nodes = {n.name: n for n in self.gm.graph.nodes}
        out = output_node(self.gm)
        out.args = ((*out.args[0], *(nodes[c.own] for c in self.caches)),)  # type: ignore[misc]

    # --- conversions --------------------------------------------------------------------------------------

    def convert(self, node: Node) -> None:
        """Replace a conversion by what one slice does."""
        _, src, dst = conversion_of(node)
        x = node.args[0]
        assert isinstance(x, Node)
        if isinstance(dst, Shard):
            assert not isinstance(src, (Shard, Partial)), f"slice_tokens: {node.name} goes from {src} to {dst}"
            new = self._rows(node, x, dst)
        elif isinstance(dst, Partial):
            new = self._share(node, x)
        else:
            assert isinstance(src, Shard), f"slice_tokens: {node.name} goes from {src} to {dst}"
            new = self._cached(node, x, src.dim)
        node.replace_all_uses_with(new)
        self.gm.graph.erase_node(node)

    def _call(self, node: Node, target: Any, *args: Any, name: str = "") -> Node:
        """A new call of the slice before ``node``, with its placements."""
        new = self._untyped(node, target, *args, name=name)
        inherit(new, node, TYPES)
        return new

    def _untyped(self, node: Node, target: Any, *args: Any, name: str = "") -> Node:
        new = insert_call(node, target, args, name=name)
        if all(x in self.free for x in new.all_input_nodes):
            new.meta["of_slice"] = True
            self.free.add(new)
        return new

    def _rows(self, node: Node, x: Node, dst: Shard) -> Node:
        """The slice's rows of each block of a dim. Equal blocks are split off: [4 · 16] -> [4, 16] -> [4, l]."""
        local = parse_placement(str(node.args[-1]))  # with the blocks after outer axes
        shape = list(x.meta["val"].shape)
        blocks = (isinstance(local, Shard) and local.blocks) or (shape[dst.dim],)
        d, c, length, total = dst.dim, self.slice.start, self.slice.length, self.slice.total
        if len(blocks) == 1:
            rows = shape[d] // total
            return self._call(node, aten.narrow.default, x, d, c * rows, length * rows)
        if len(set(blocks)) == 1:
            rows = blocks[0] // total
            apart = self._call(node, aten.reshape.default, x, [*shape[:d], len(blocks), blocks[0], *shape[d + 1 :]])
            part = self._call(node, aten.narrow.default, apart, d + 1, c * rows, length * rows)
            flat = [*shape[:d], len(blocks) * length * rows, *shape[d + 1 :]]
            return self._call(node, aten.reshape.default, part, flat)
        parts, position = [], 0
        for block in blocks:
            rows = block // total
            parts.append(self._call(node, aten.narrow.default, x, d, position + c * rows, length * rows))
            position += block
        return self._call(node, aten.cat.default, parts, d)

    def _share(self, node: Node, x: Node) -> Node:
        """A slice's share, l/S, of a value that every slice computes in full. Its weight is a sum of as many entries
        1/S as the slice has tokens, since graphs have no fractions of lengths."""
        val, total = x.meta["val"], self.slice.total
        kwargs = {"dtype": val.dtype, "device": val.device}
        weights = insert_call(node, aten.full.default, ([total], 1.0 / total), kwargs)
        self.free.add(weights)
        mine = self._call(node, aten.narrow.default, weights, 0, self.slice.start, self.slice.length)
        weight = self._call(node, aten.sum.default, mine)
        return self._call(node, aten.mul.Tensor, x, weight)

    def _cached(self, node: Node, x: Node, dim: int) -> Node:
        """Keys of earlier slices (an input) and the slice's own (an output)."""
        past = add_placeholder(self.gm.graph, f"past_{x.name}", placeholders(self.gm)[-1])
        val = x.meta["val"]
        shape = [self.slice.start if d == dim else n for d, n in enumerate(val.shape)]
        past.meta["val"] = val.new_empty(shape)
        inherit(past, x, (*TYPES, *ORIGIN, "has_gradient"))
        self.specs[past.name] = "past"
        own = self._call(node, aten.clone.default, x, name=f"own_{x.name}")
        own.kwargs = {"memory_format": torch.contiguous_format}
        own.meta["val"] = val.new_empty(val.shape)
        joined = self._call(node, torch.ops.autopar.extend.default, past, own, dim)
        self.caches.append(Cache(past.name, own.name, dim))
        self.known.add(joined)
        return joined

    # --- attention ----------------------------------------------------------------------------------------

    def attend(self, node: Node) -> None:
        """Keys from a cache include none of later tokens: drop these from every operand with a dim of keys."""
        args = arguments(node)
        if not any(self._from_cache(args[name]) for name in ("k", "v")):
            return
        end, total = self.slice.start + self.slice.length, self.slice.total
        for name, dim in (("k", 2), ("v", 2), ("key_mask", 1), ("segments", 1), ("bias", -1)):
            x = args[name]
            if isinstance(x, Node) and not self._from_cache(x) and x.meta["val"].shape[dim] == total:
                set_argument(node, name, self._until(node, x, dim % x.meta["val"].dim(), end))
        if args["index"]:
            keys = self._until(node, args["index"][3], 0, end)
            set_argument(node, "index", [*args["index"][:3], keys])

    def _from_cache(self, x: Node) -> bool:
        """Whether it is the cache, or a conversion of it over another axis; updates the conversion's shape."""
        if x in self.known:
            return True
        if not is_conversion(x) or not self._from_cache(x.args[0]):  # type: ignore[arg-type]
            return False
        x.meta["val"] = run_fake(x.graph, x.target, x.args)  # type: ignore[arg-type]
        self.known.add(x)
        return True

    def _until(self, node: Node, x: Node, dim: int, end: int) -> Node:
        """The rows of this and of earlier slices."""
        return self._untyped(node, aten.narrow.default, x, dim, 0, end)

"""lower_to_local: from the global graph to the local graph of one rank.

Consumes    a global graph with placements.
Guarantees  every value has one rank's shape; conversions are collectives; placements and global shapes stay in the
            metadata, so that the types can still be checked.
Leaves      the order of nodes; the rank's coordinate (all ranks get the same graph).

    y_r = convert(y, "tp", "P", "I")      -->    y_r = exchange(y, "tp", 2, "P", "I")
    v = view(x, [4, 16, 8, 4])            -->    v = view(x, [4, 16, 4, 4])               # heads sharded on tp=2
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.operator import FACT_NAMES, attention_of_piece, problem_of_pieces
from autopar.ir.conversions import conversion_of, exchange, exchange_slice, is_conversion
from autopar.ir.expert_layers import dispatch_of
from autopar.ir.graph import (
    ancestors,
    arguments,
    describe,
    global_shape,
    insert_call,
    placeholders,
    placement,
    set_argument,
    tensor_operands,
    values,
)
from autopar.ir.halo import shift_of_piece, token_conv1d_of_piece
from autopar.ir.mesh import Mesh
from autopar.ir.meta import TYPES, inherit, signature_of
from autopar.ir.placement import INVARIANT, Pieces, Placement, Shard, repetitions
from autopar.ir.scans import SCANS, scan_of_piece
from autopar.ops.mask_spec import MaskSpec
from autopar.ops.padded_pieces import rows_per_rank, zero_padding
from autopar.ops.token_dispatch import combine_tokens, dispatch_tokens
from autopar.ops.token_dispatch.dealt_rows import dealt_rows_of_rank
from autopar.ops.token_windows import shift, token_conv1d
from autopar.ops.traits import CONVOLUTIONS, FILLED
from autopar.ops.vocab_parallel import cross_entropy_of_piece, embedding_of_piece
from autopar.passes.autodiff.vjp import fake_result
from autopar.plan import Plan
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass
from autopar.rules import local_shapes

aten = torch.ops.aten


class LowerToLocal(Pass):
    """Rewrites shapes, sizes and the few ops that compute differently on a shard."""

    name = "lower_to_local"
    requires = ("placements",)
    ensures = ("local_shapes",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        for node in list(gm.graph.nodes):
            if node.op == "output":
                continue
            several = isinstance(node.meta["val"], (list, tuple))
            node.meta["global_shape"] = (
                [tuple(v.shape) for v in values(node)] if several else tuple(node.meta["val"].shape)
            )
        for node in list(gm.graph.nodes):
            if node.op == "placeholder":
                node.meta["val"] = node.meta["val"].new_empty(local_shapes(node, ctx.mesh)[0])
            elif node.op == "call_function":
                _Local(gm, node, ctx.mesh, ctx.plan).rewrite()
        gm.recompile()
        return gm


class _Local:
    """One call on local operands."""

    def __init__(self, gm: GraphModule, node: Node, mesh: Mesh, plan: Plan | None = None) -> None:
        self.gm, self.node, self.mesh, self.plan = gm, node, mesh, plan
        self.shapes = local_shapes(node, mesh)
        self.args = arguments(node)

    def rewrite(self) -> None:
        node = self.node
        if is_conversion(node):
            self._conversion()
        elif node.target in LOCALIZERS:
            LOCALIZERS[node.target](self)
        self._run_fake()

    def _run_fake(self) -> None:
        """Run the call on fake local operands: the shapes must be those that the placements imply."""
        node = self.node
        node.meta["val"] = fake_result(node)
        found = [tuple(v.shape) for v in values(node)]
        assert found == self.shapes, f"lower_to_local: {describe(node)} gives {found}, its placements say {self.shapes}"

    def _conversion(self) -> None:
        axis, src, dst = conversion_of(self.node)
        self.node.meta["conversion"] = (axis, src, dst)
        src, dst = self.local_placement(axis, src), self.local_placement(axis, dst)
        self.node.target, self.node.args = exchange_over(self.mesh, self.node.args[0], axis, src, dst)

    def local_placement(self, axis: str, p: Placement) -> Placement:
        """The blocks of a Shard after the outer axes have sharded a repeated pattern of blocks."""
        if not isinstance(p, Shard) or not p.blocks:
            return p
        later = list(self.mesh.cut_order)[list(self.mesh.cut_order).index(axis) + 1 :]
        taken = 1
        for name in later:
            other = placement(self.node, name)
            if isinstance(other, Shard) and other.dim == p.dim and repetitions(other.blocks) % len(p.blocks):
                taken *= self.mesh.size(name)
        return Shard(p.dim, p.blocks[: len(p.blocks) // taken], units=p.units)

    def set_sizes(self, name: str) -> None:
        set_argument(self.node, name, list(self.shapes[0]))

    def cut_axes(self, operand: str, dim: int) -> list[str]:
        """Axes that a dim of an operand is sharded on."""
        x = self.args[operand]
        found = [(a, placement(x, a)) for a in self.mesh.cut_order]
        return [a for a, p in found if isinstance(p, Shard) and p.dim == dim % len(global_shape(x))]


def exchange_over(mesh: Mesh, x: Any, axis: str, src: Placement, dst: Placement) -> tuple[Any, tuple[Any, ...]]:
    """(target, arguments) of the conversion of ``x`` in a local graph."""
    if axis != "sl":
        return exchange, (x, axis, mesh.size(axis), str(src), str(dst))
    assert mesh.slice is not None
    return exchange_slice, (x, mesh.slice.length, mesh.slice.start, mesh.slice.total, str(src), str(dst))


# --- ops with sizes as arguments, or that compute differently on a shard ----------------------------------


def _split_sizes(local: _Local) -> None:
    dim = int(local.args["dim"])
    set_argument(local.node, "split_sizes", [s[dim] for s in local.shapes])


def _split_size(local: _Local) -> None:
    set_argument(local.node, "split_size", local.shapes[0][int(local.args["dim"])])


def _unflatten(local: _Local) -> None:
    dim = int(local.args["dim"]) % len(global_shape(local.args["self"]))
    set_argument(local.node, "sizes", list(local.shapes[0][dim : dim + len(local.args["sizes"])]))


def _repeated(local: _Local) -> None:
    if local.args["output_size"] is not None:
        set_argument(local.node, "output_size", local.shapes[0][int(local.args["dim"] or 0)])


def _squeeze(local: _Local) -> None:
    """A dim that has size 1 only because it is sharded must stay."""
    node = local.node
    node.target, node.args, node.kwargs = aten.reshape.default, (local.args["self"], list(local.shapes[0])), {}


def _mean(local: _Local) -> None:
    """A mean over a sharded dim is a sum of local means, each divided by the number of shards; or, where shards are not
    equal, of sums divided by the count of all. With replicas some microbatches may be absent: `split_prologue`."""
    x = local.args["self"]
    rank = len(global_shape(x))
    dims = local.args.get("dim") or list(range(rank))
    ranks: Pieces = 1
    unequal, of_microbatches = local.mesh.slice is not None, False  # slices differ in length
    for axis, size in local.mesh.cut_order.items():
        p = placement(x, axis)
        if isinstance(p, Shard) and p.dim in {d % max(rank, 1) for d in dims}:
            ranks *= size
            unequal |= bool(p.units)
            of_microbatches |= axis == "mb"
    if ranks == 1:
        return
    node = local.node
    factor = 1.0 / ranks
    if unequal:
        dims = [d % max(rank, 1) for d in dims]
        node.target, node.kwargs = aten.sum.dim_IntList, {"dtype": local.args.get("dtype")}
        node.args = (x, dims, bool(local.args.get("keepdim", False)))
        factor = 1.0 / math.prod(global_shape(x)[d] for d in dims)
    scaled = insert_call(node.next, aten.mul.Tensor, (node, factor), like=node, val=node.meta["val"])
    inherit(scaled, node, TYPES)
    scaled.meta["of_microbatches"] = of_microbatches
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    _Local(local.gm, node, local.mesh)._run_fake()
    _Local(local.gm, scaled, local.mesh)._run_fake()


def _groups(local: _Local, name: str = "groups") -> None:
    """Groups are sharded where both input and output channels are; else the channels within each group."""
    groups = int(local.args[name])
    if groups > 1:
        channels = _channels(local)
        local.node.meta["global_groups"] = groups
        for axis in local.cut_axes("input", channels):
            made = placement(local.node, axis)
            if isinstance(made, Shard) and made.dim == channels:
                groups = rows_per_rank(groups, made.units, local.mesh.size(axis))
        set_argument(local.node, name, groups)


def _channels(local: _Local) -> int:
    """The channel dim of a convolution: 0 where its input is one example without a batch dim."""
    alone = local.node.target in CONVOLUTIONS and len(global_shape(local.args["input"])) < len(
        global_shape(local.args["weight"])
    )
    return 0 if alone else 1


def _vocabulary_axis(local: _Local, name: str, dim: int) -> str:
    axes = local.cut_axes(name, dim)
    if len(axes) > 1:
        raise ValueError(f"plan: the vocabulary of {describe(local.node)} is sharded on {axes}; shard it on one axis")
    return axes[0] if axes else ""


def _units(local: _Local, name: str, axis: str) -> tuple[int, ...]:
    p = placement(local.args[name], axis)
    return (p.units,) if isinstance(p, Shard) and p.units else ()


def _embedding(local: _Local) -> None:
    axis, node, args = _vocabulary_axis(local, "weight", 0), local.node, local.args
    if not axis:
        return
    node.target, node.kwargs = embedding_of_piece, {}
    name = _source_of(args["indices"], local.gm, "ids")
    node.args = (args["weight"], args["indices"], args["padding_idx"], axis, local.mesh.size(axis), name)
    node.args += _units(local, "weight", axis)


def _cross_entropy(local: _Local) -> None:
    axis, node, args = _vocabulary_axis(local, "logits", 1), local.node, local.args
    if not axis:
        return
    node.target, node.kwargs = cross_entropy_of_piece, {}
    node.args = (
        *(args[k] for k in ("logits", "target", "ignore_index", "label_smoothing")),
        axis,
        local.mesh.size(axis),
        _source_of(args["target"], local.gm, "labels"),
        *_units(local, "logits", axis),
    )


def _zero_padding(local: _Local) -> None:
    x, axis, _, dim, _, units, *when = local.node.args
    p = local.local_placement(str(axis), placement(local.node, str(axis)))
    assert isinstance(p, Shard)
    local.node.args = (x, axis, local.mesh.size(str(axis)), dim, list(p.blocks), units, *when)


def _dispatch(local: _Local) -> None:
    chosen, node, args = local.node.meta.get("experts"), local.node, local.args
    if chosen is not None:
        where = chosen.token_dispatcher, chosen.axis, local.mesh.size(chosen.axis), chosen.per_node
        node.target, node.kwargs = dispatch_tokens, {}
        experts = -(-args["num_experts"] // where[2]) * where[2]  # with padding, to which no token is sent
        node.args = (args["x"], args["expert"], experts, *where)


def _combine(local: _Local) -> None:
    chosen, node, args = local.node.meta.get("experts"), local.node, local.args
    if chosen is not None and chosen.sends_tokens:
        node.target, node.kwargs = combine_tokens, {}
        _, *where = dispatch_of(node).args
        node.args = (args["rows"], args["order"], args["weights"], *where)


def _source_of(x: Node, gm: GraphModule, what: str) -> str:
    """'ids of "tokens"': the inputs of the model that a value is computed from, for messages."""
    names = {s.node: s.name for s in signature_of(gm).inputs if s.kind == "input"}
    found = [names[n.name] for n in placeholders(gm) if n.name in names and n in ancestors([x])]
    return f"{what} of " + " and ".join(f'"{name}"' for name in found) if found else what


def _dropout(local: _Local) -> None:
    """The mask, or the numbers, are a function of global indices: pass the indices of the local rows."""
    x = tensor_operands(local.node)[0]
    _pass_indices(
        local,
        global_shape(x),
        [{a: placement(x, a) for a in local.mesh.cut_order}] * len(global_shape(x)),
        list(range(9)),
    )


def _attention(local: _Local) -> None:
    """The queries of a token slice stand at its first token. The dropout mask of the probabilities (batch, heads,
    queries, keys) may be sharded like q on all dims but the keys. A sequence sharded on cp runs an algorithm."""
    q, k, cut = local.args["q"], local.args["k"], placement(local.args["q"], "cp")
    over_tokens = isinstance(cut, Shard) and cut.dim == 2  # else another attention's tokens are rows of this one
    if isinstance(placement(q, "sl"), Shard) and local.mesh.slice is not None:
        set_argument(local.node, "offset", local.mesh.slice.start)
    if local.args["dropout"]:
        shape = (*global_shape(q)[:3], global_shape(k)[2])
        of_q = {a: placement(q, a) for a in local.mesh.cut_order if not (a == "cp" and over_tokens)}
        _pass_indices(local, shape, [of_q, of_q, of_q, {}], [0, 1, 2, 3])
    if over_tokens:
        _context_attention(local)


def _context_attention(local: _Local) -> None:
    """Queries and keys are sharded on cp: run the algorithms that the plan chose."""
    node, args = local.node, arguments(local.node)
    assert local.plan is not None
    chosen, size = local.plan.attention[node.name], local.mesh.size("cp")
    given = [args[name] for name in ("q", "k", "v", *FACT_NAMES)]
    q, k, v, *facts = torch.fx.node.map_arg(given, lambda n: n.meta["val"])
    problem = problem_of_pieces(q, k, v, MaskSpec(*facts), chosen.query_blocks, chosen.key_blocks, size)
    ranks = ALGORITHMS[chosen.forward].head_ranks(problem)
    how = (chosen.forward, chosen.backward, list(chosen.query_blocks), list(chosen.key_blocks), "cp", size, ranks)
    node.target, node.args, node.kwargs = attention_of_piece, (*given, *how), {}


def _along_tokens(local: _Local, x: str, dim: int, target: Callable[..., torch.Tensor], args: Any) -> None:
    """Rows of other ranks reach a rank's tokens through ``target``, if cp shards these."""
    cut = placement(local.args[x], "cp")
    if isinstance(cut, Shard) and cut.dim == dim:
        own = local.local_placement("cp", cut)
        assert isinstance(own, Shard)
        local.node.target, local.node.kwargs = target, {}
        local.node.args = (*args, "cp", local.mesh.size("cp"), list(own.blocks))


def _shift(local: _Local) -> None:
    _along_tokens(local, "x", int(local.args["dim"]), shift_of_piece, arguments(local.node).values())


def _token_conv1d(local: _Local) -> None:
    _groups(local)
    _along_tokens(local, "input", 2, token_conv1d_of_piece, arguments(local.node).values())


def _scan(local: _Local) -> None:
    x, dim = local.args["self"], int(local.args["dim"])
    if rank := len(global_shape(x)):
        name = SCANS[local.node.target].name
        _along_tokens(local, "self", dim % rank, scan_of_piece, (name, x, dim % rank, local.args.get("dtype")))


def _pass_indices(local: _Local, shape: tuple[int, ...], placed: list[dict[str, Placement]], dims: list[int]) -> None:
    cut = any(isinstance(p, Shard) for of in placed for p in of.values())
    if not cut:
        set_argument(local.node, "shape", list(shape))
        return
    index = []
    device = local.args["seed"].meta["val"].device
    for i, size in enumerate(shape):
        index.append(
            _global_index(
                local, size, {a: p for a, p in placed[i].items() if isinstance(p, Shard) and p.dim == dims[i]}, device
            )
        )
    set_argument(local.node, "index", index)
    set_argument(local.node, "shape", list(shape))


def _global_index(local: _Local, size: int, cuts: dict[str, Placement], device: torch.device) -> Node:
    """The global indices of the local rows of a dim: arange, sharded as the dim is."""
    node = insert_call(local.node, aten.arange.default, (size,), {"device": device}, name="index")
    for axis, p in cuts.items():
        assert isinstance(p, Shard)
        target, args = exchange_over(local.mesh, node, axis, INVARIANT, dataclasses.replace(p, dim=0))
        node = insert_call(local.node, target, args, name="index")
        node.meta["conversion"] = (axis, INVARIANT, dataclasses.replace(p, dim=0))
    _type_chain(node, size, cuts)
    return node


def _chain(node: Node) -> list[Node]:
    out = [node]
    while tensor_operands(out[-1]):
        out.append(tensor_operands(out[-1])[0])
    return out[::-1]


def _type_chain(node: Node, size: int, cuts: dict[str, Placement]) -> None:
    placed: dict[str, Placement] = {}
    for x, axis in zip(_chain(node), [None, *cuts], strict=True):
        if axis is not None:
            p = cuts[axis]
            assert isinstance(p, Shard)
            placed = {**placed, axis: dataclasses.replace(p, dim=0)}
        x.meta["placements"], x.meta["global_shape"] = placed, (size,)


def _masked_scatter(local: _Local) -> None:
    """Where the rows of the source are sharded, a rank's rows fill its own examples: neither more nor less."""
    mask, source, shape = local.args["mask"], local.args["source"], local.shapes[0]
    if not local.cut_axes("source", 0):
        return
    rows = math.prod(source.meta["val"].shape) * math.prod(mask.meta["val"].shape) // math.prod(shape)
    text = (
        f"{_source_of(mask, local.gm, 'a mask')} fills {{found}} entries of {describe(local.node)} on a rank that has "
        f"{rows} rows: each example needs its own rows, in the order of the examples, and none that torch leaves out"
    )
    watched = insert_call(local.node, torch.ops.autopar.watch_count.default, (mask, rows, text), like=mask)
    inherit(watched, mask, TYPES)
    set_argument(local.node, "mask", watched)


def _filled_rows(local: _Local) -> None:
    text = (
        f"{_source_of(local.args['mask'], local.gm, 'a mask')} selects {{found}} entries for the {{rows}} rows of "
        f"{describe(local.node)}: it must select as many as there are rows, on each rank, in the order of the examples"
    )
    set_argument(local.node, "text", text)


def _placed_rows(local: _Local) -> None:
    text = (
        f"{_source_of(local.args['selected'], local.gm, 'a mask')} selects {{found}} more rows than there are places "
        f"for them in {describe(local.node)}: there must be as many, on each rank, in the order of the examples"
    )
    set_argument(local.node, "text", text)


def _dealt_rows(local: _Local) -> None:
    axis, args = str(local.args["axis"]), local.args
    if axis in local.cut_axes("x", 0):
        local.node.target, local.node.kwargs = dealt_rows_of_rank, {}
        local.node.args = (*args.values(), local.mesh.size(axis))


LOCALIZERS: dict[Any, Callable[[_Local], None]] = {
    aten.view.default: lambda local: local.set_sizes("size"),
    aten.reshape.default: lambda local: local.set_sizes("shape"),
    aten.expand.default: lambda local: local.set_sizes("size"),
    aten._unsafe_view.default: lambda local: local.set_sizes("size"),
    aten.split_with_sizes.default: _split_sizes,
    aten.split.Tensor: _split_size,
    aten.unflatten.int: _unflatten,
    aten.repeat_interleave.self_int: _repeated,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    **dict.fromkeys(CONVOLUTIONS, _groups),
    token_conv1d: _token_conv1d,
    shift: _shift,
    **dict.fromkeys(SCANS, _scan),
    aten.group_norm.default: lambda local: _groups(local, "num_groups"),
    aten.embedding.default: _embedding,
    zero_padding: _zero_padding,
    aten.masked_scatter.default: _masked_scatter,
    torch.ops.autopar.filled_rows.default: _filled_rows,
    torch.ops.autopar.placed_rows.default: _placed_rows,
    torch.ops.autopar.dealt_rows.default: _dealt_rows,
    torch.ops.autopar.cross_entropy.default: _cross_entropy,
    torch.ops.autopar.moe_dispatch.default: _dispatch,
    torch.ops.autopar.moe_combine.default: _combine,
    torch.ops.autopar.dropout.default: _dropout,
    torch.ops.autopar.random.default: _dropout,
    torch.ops.autopar.attention.default: _attention,
    **dict.fromkeys(FILLED, lambda local: local.set_sizes("size")),
}

"""pack_tokens: from a graph with placements on "sl" to the graph that runs T tokens of any requests.

Consumes    a local graph with placements of a capture of one row of S tokens per data rank, without gradients
            (`place_token_slices`, `lower_to_local`). Its types prove that nothing but causal attention looks at other
            tokens, so the T tokens need not be neighbours, nor of one request.
Guarantees  no conversion over "sl" is left. The ids are the T tokens of a step. What no token has a part in (rotary
            tables, embeddings of positions, biases) is computed by a graph of its own, for all S positions; the main
            graph takes its rows at ``positions`` [T]. Attention reads and writes the pages of a cache
            (`autopar::cached_attention`). Logits are made of the rows ``last`` [N] alone, selected as early as can be.
Leaves      the operators in between, and their order.

    ids_s = exchange_slice(ids, "I", "S(1)")        -->    tokens [1, T]
    cos_s = exchange_slice(cos, "I", "S(2)")        -->    cos_s = index_select(table_0, 2, positions)
    k_r = exchange_slice(k, "S(2)", "R")            -->
    y = attention(q, k_r, v_r, ...)                 -->    y = cached_attention(q, k, v, keys_0, values_0, slots_0, ...)
    logits = linear(norm(h), w)                     -->    logits = linear(norm(index_select(h, 1, last)), w)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from autopar.ir.conversions import conversion_of, exchange_slice, is_conversion
from autopar.ir.graph import (
    add_placeholder,
    ancestors,
    arguments,
    describe,
    extracted,
    fake_mode,
    frozen,
    insert_call,
    is_call,
    output_node,
    outputs,
    placeholders,
    placement,
    remove_dead_code,
    run_fake,
    tensor_operands,
)
from autopar.ir.mesh import DATA, TokenSlice
from autopar.ir.meta import ORIGIN, TYPES, inherit, signature_of
from autopar.ir.placement import Partial, Shard, conversion, parse_placement
from autopar.ops.token_dispatch import combine_tokens
from autopar.ops.traits import ASKS
from autopar.passes.canonicalize.constant_masks import constant
from autopar.rewrite.build import Build
from autopar.steps.packed import LAST, LENGTHS, POSITIONS, STARTS, CachedLayer, pages, slots

aten = torch.ops.aten
_ATTENTION = torch.ops.autopar.attention.default
_CACHED = torch.ops.autopar.cached_attention.default
AXIS = "sl"
_STOPS = (  # what looks at other tokens, or has routed them
    _CACHED, aten.index_select.default, combine_tokens, torch.ops.autopar.moe_combine.default,
)  # fmt: skip
_FACTORIES = {  # what makes values alike for all tokens: (the same for any sizes, whether it has an operand)
    aten.new_empty.default: (aten.new_empty.default, True), aten.new_zeros.default: (aten.new_zeros.default, True),
    aten.new_ones.default: (aten.new_ones.default, True), aten.new_full.default: (aten.new_full.default, True),
    aten.empty_like.default: (aten.new_empty.default, True), aten.zeros_like.default: (aten.new_zeros.default, True),
    aten.ones_like.default: (aten.new_ones.default, True), aten.full_like.default: (aten.new_full.default, True),
    aten.zeros.default: (aten.zeros.default, False), aten.ones.default: (aten.ones.default, False),
    aten.full.default: (aten.full.default, False), aten.empty.memory_format: (aten.empty.memory_format, False),
}  # fmt: skip
_SIZED = {  # operators with a list of sizes: the name of the argument
    aten.view.default: 1, aten.reshape.default: 1, aten._unsafe_view.default: 1, aten.expand.default: 1,
}  # fmt: skip


@dataclass
class PackedGraph:
    """``main`` runs the tokens of a step; ``tables`` makes the inputs of main that are named in ``table_names``, from
    parameters, buffers, constants and the positions of one document. windows: how far the layers of each kind look
    back, 0 for all tokens (kind 0)."""

    main: GraphModule
    tables: GraphModule | None
    table_names: list[str] = field(default_factory=list)
    layers: list[CachedLayer] = field(default_factory=list)
    windows: tuple[int, ...] = (0,)
    replaced: dict[Node, Node] = field(default_factory=dict)  # attention -> cached attention


def pack_tokens(gm: GraphModule, part: TokenSlice, split_kv: bool = True, gathers_ahead: bool = False) -> PackedGraph:
    """Remove the axis "sl" from a local graph whose only output is the logits [1, S, V]. ``gathers_ahead``: what
    depends on parameters alone, such as gathered and cast ones, is a table, too. Raises ValueError, with the operator,
    for attention that is not causal or masks tokens by values."""
    packer = _Packer(gm, part, split_kv)
    packer.run()
    if gathers_ahead:
        packer.gather_ahead()
    tables = extracted(gm, list(packer.made_by.values()), "Tables") if packer.tables else None
    remove_dead_code(gm)
    packer.select_last()
    gm.recompile()
    names = [n.name for n in packer.tables.values()]
    return PackedGraph(gm, tables, names, packer.layers, packer.windows, packer.replaced)


class _Packer:
    def __init__(self, gm: GraphModule, part: TokenSlice, split_kv: bool) -> None:
        self.gm, self.part, self.split_kv = gm, part, split_kv
        self.layers: list[CachedLayer] = []
        self.tables: dict[Any, Node] = {}  # structure of a value -> the input that takes its place
        self.made_by: dict[Node, Node] = {}  # input -> the value
        self.rows: dict[tuple[Node, int], Node] = {}
        self.replaced: dict[Node, Node] = {}
        self.joined: set[Node] = set()  # keys and values, no longer joined with those of other tokens
        self.known: dict[Node, Any] = {}
        self.numbers: dict[Any, int] = {}  # of structures
        self.mode = fake_mode(gm.graph)
        end = placeholders(gm)[-1]
        self.inputs: dict[str, Node] = {}
        for name, size in ((POSITIONS, part.length), (LAST, part.start), (STARTS, 3), (LENGTHS, 2)):
            end = self._input(name, end, size, torch.int64 if name in (POSITIONS, LAST) else torch.int32)
        windows = {arguments(n)["window"] for n in gm.graph.nodes if is_call(n, _ATTENTION)}
        self.windows = (0, *sorted(w for w in windows if 0 < w < part.total))
        for kind in range(len(self.windows)):
            end = self._input(slots(kind), end, part.length, torch.int64)
            end = self._input(pages(kind), end, (2, 2), torch.int32)
        self.end = end

    def _input(self, name: str, after: Node, size: Any, dtype: torch.dtype) -> Node:
        node = add_placeholder(self.gm.graph, name, after)
        if node.name != name:
            raise ValueError(
                f"serve: {name} is an input of steps, found a value of the model with this name; rename it"
            )
        with self.mode:
            val = torch.empty(size, dtype=dtype)
        node.meta = {"val": val, "has_gradient": False}
        self.inputs[name] = node
        return node

    def run(self) -> None:
        for node in list(self.gm.graph.nodes):
            if is_call(node, exchange_slice):
                self._convert(node)
            elif is_conversion(node) and node.args[0] in self.joined:
                node.meta["val"] = run_fake(node.graph, node.target, node.args)
                self.joined.add(node)
            elif is_call(node, _ATTENTION):
                self._attend(node)

    def gather_ahead(self) -> None:
        """Values of parameters alone become tables where others use them."""
        kinds = {spec.node: spec.kind for spec in signature_of(self.gm).inputs}
        alone = {n for n in placeholders(self.gm) if kinds.get(n.name) in ("parameter", "buffer", "constant")}
        made = list[Node]()
        for node in self.gm.graph.nodes:
            operands = tensor_operands(node)
            if node.op == "call_function" and operands and all(x in alone for x in operands):
                alone.add(node)
                made.append(node)
        of_tables = ancestors(self.made_by.values())
        for node in made:
            others = [user for user in node.users if user not in alone and user not in of_tables]
            if others and isinstance(node.meta["val"], torch.Tensor):
                table = self._table(node)
                for user in others:
                    user.replace_input_with(node, table)

    # --- conversions --------------------------------------------------------------------------------------

    def _convert(self, node: Node) -> None:
        _, src, dst = conversion_of(node)
        x = node.args[0]
        assert isinstance(x, Node)
        if isinstance(dst, Shard) and not isinstance(src, (Shard, Partial)):
            new = self._rows(node, x, dst)
            inherit(new, node, TYPES)
        elif isinstance(src, Shard) and not isinstance(dst, (Shard, Partial)):
            new = x  # keys and values, which attention takes from the cache
            self.joined.add(x)
        else:
            raise ValueError(_refusal(node, f"{x.name} goes from {src} to {dst}"))
        node.replace_all_uses_with(new)
        self.gm.graph.erase_node(node)

    def _rows(self, node: Node, x: Node, dst: Shard) -> Node:
        """The rows of a table at the positions of the step's tokens; in each of its equal blocks."""
        if x.target in _FACTORIES:
            return self._factory(node, x, dst.dim)
        table = self._table(x)
        key = (table, dst.dim)
        if key in self.rows:
            return self.rows[key]
        local = parse_placement(str(node.args[-1]))
        shape, d = list(x.meta["val"].shape), dst.dim
        blocks = (isinstance(local, Shard) and local.blocks) or (shape[d],)
        positions = self.inputs[POSITIONS]
        if blocks == (self.part.total,):
            new = insert_call(node, aten.index_select.default, (table, d, positions))
        elif set(blocks) == {self.part.total}:
            apart = [*shape[:d], len(blocks), self.part.total, *shape[d + 1 :]]
            split = insert_call(node, aten.reshape.default, (table, apart))
            taken = insert_call(node, aten.index_select.default, (split, d + 1, positions))
            flat = [*shape[:d], len(blocks) * self.part.length, *shape[d + 1 :]]
            new = insert_call(node, aten.reshape.default, (taken, flat))
        else:
            raise ValueError(_refusal(node, f"its dim {d} has blocks {list(blocks)} of {self.part.total} positions"))
        self.rows[key] = new
        return new

    def _factory(self, node: Node, x: Node, dim: int) -> Node:
        """A value that is the same for every token, made for those of the step."""
        target, has_operand = _FACTORIES[x.target]  # type: ignore[index]
        shape = list(x.meta["val"].shape)
        if shape[dim] % self.part.total:
            raise ValueError(_refusal(x, f"its dim {dim} of size {shape[dim]} is not of {self.part.total} positions"))
        shape[dim] = shape[dim] // self.part.total * self.part.length
        like = str(x.target).partition(".")[2].endswith("_like.default")
        first = x.args[:1] if has_operand else ()
        rest = x.args[1:] if like or not has_operand else x.args[2:]
        kwargs = {name: v for name, v in x.kwargs.items() if not like or name != "memory_format"}
        return insert_call(node, target, (*first, shape, *rest), kwargs)

    def _table(self, x: Node) -> Node:
        """The input that takes the place of a value that no token has a part in; equal ones are one."""
        key = self._structure(x)
        if key not in self.tables:
            node = add_placeholder(self.gm.graph, f"table_{len(self.tables)}", self.end)
            node.meta = {"val": x.meta["val"], "has_gradient": False}
            inherit(node, x, (*TYPES, *ORIGIN))
            self.tables[key] = self.end = node
            self.made_by[node] = x
        return self.tables[key]

    def _structure(self, x: Node) -> Any:
        """Equal for values that are computed in the same way from the same inputs."""
        if x not in self.known:
            if x.op == "placeholder":
                self.known[x] = x.name
            else:
                leaf = lambda v: self._structure(v) if isinstance(v, Node) else (type(v).__name__, repr(v))  # noqa: E731
                key = (str(x.target), frozen(x.args, leaf), frozen(x.kwargs, leaf))
                self.known[x] = self.numbers.setdefault(key, len(self.numbers))
        return self.known[x]

    # --- attention ----------------------------------------------------------------------------------------

    def _attend(self, node: Node) -> None:
        args = arguments(node)
        k, v = args["k"], args["v"]
        if k not in self.joined and v not in self.joined:
            if any(isinstance(placement(x, AXIS), Shard) for x in (k, v)):
                raise ValueError(_refusal(node, "it is not causal"))
            return  # keys that no token has a part in
        if k not in self.joined or v not in self.joined or not args["causal"]:
            raise ValueError(_refusal(node, "only one of its keys and values is of tokens"))
        for name, why in (("segments", "separates documents"), ("seed", "drops out")):
            if args[name] is not None:
                raise ValueError(_refusal(node, f"it {why}, which a request has none of"))
        q, k, v, bias = self._of_one_row(node, args)
        i, window = len(self.layers), args["window"] if args["window"] < self.part.total else 0
        kind = self.windows.index(window)
        pools = []
        for name, x in (("keys", k), ("values", v)):
            pool = add_placeholder(self.gm.graph, f"{name}_{i}", self.end)
            val = x.meta["val"]
            pool.meta = {"val": val.new_empty((2, 4, val.shape[1], val.shape[3])), "has_gradient": False}
            self.end = pool
            pools.append(pool)
        (_, heads, _, width), (_, value_heads, _, value_width) = k.meta["val"].shape, v.meta["val"].shape
        dtype = k.meta["val"].dtype
        self.layers.append(
            CachedLayer(pools[0].name, pools[1].name, (heads, width), (value_heads, value_width), dtype, kind)
        )
        described = [self.inputs[n] for n in (slots(kind), pages(kind), STARTS, LENGTHS)]
        mask = (
            bias,
            args["sinks"],
            window,
            args["chunk"],
            args["scale"],
            args["softcap"],
            self.split_kv,
        )
        new = insert_call(node, _CACHED, (q, k, v, *pools, *described, *mask))
        if q is not args["q"]:
            new = insert_call(
                node, aten.reshape.default, (new, [*args["q"].meta["val"].shape[:-1], v.meta["val"].shape[-1]])
            )
        self.replaced[node] = new
        for user in list(node.users):
            if not (is_call(user, operator.getitem) and user.args[1] == 0):
                raise ValueError(
                    _refusal(
                        user, "a token may be without keys there, or the forward reads the log-sum-exps of attention"
                    )
                )
            inherit(new, user, TYPES)
            user.replace_all_uses_with(new)
            self.gm.graph.erase_node(user)
        self.gm.graph.erase_node(node)

    def _of_one_row(self, node: Node, args: dict[str, Any]) -> tuple[Node, Node, Node, Node | None]:
        """q, k, v [1, heads, tokens, width] and the bias; heads may lie in the dim of rows, as for torch.bmm."""
        given = (args["q"], args["k"], args["v"])
        rows, bias = args["q"].meta["val"].shape[0], self._bias(node, args)
        if rows == 1:
            return *given, bias
        build = Build(node)
        sizes = torch.Size() if bias is None else bias.meta["val"].shape
        of_heads = sizes[:2].numel() > 1
        if args["sinks"] is not None or (of_heads and sizes[0] != rows):
            raise ValueError(_refusal(node, "its heads lie in two dims"))
        if of_heads:
            bias = build(aten.reshape.default, bias, [1, -1, *sizes[2:]])
        q, k, v = (build(aten.reshape.default, x, [1, -1, *x.meta["val"].shape[2:]]) for x in given)
        return q, k, v, bias

    def _bias(self, node: Node, args: dict[str, Any]) -> Node | None:
        """The bias of an attention; a mask of keys, the same for all requests, is added to it."""
        bias, keep = args["bias"], args["key_mask"]
        if keep is None or ((found := constant(keep)) is not None and bool(found.all())):
            return bias
        if isinstance(placement(keep, AXIS), Shard):
            raise ValueError(_refusal(node, "it masks keys by values of tokens"))
        build, dtype = Build(node), args["q"].meta["val"].dtype
        apart = build(aten.reshape.default, self._table(keep), [1, 1, 1, self.part.total])
        zero, never = (build(aten.full.default, [], x, dtype=dtype) for x in (0.0, float("-inf")))
        added = build(aten.where.self, apart, zero, never)
        return added if bias is None else build(aten.add.Tensor, bias, added)

    # --- logits -------------------------------------------------------------------------------------------

    def select_last(self) -> None:
        """Compute the logits of rows ``last`` alone: the nodes that lead to nothing else, as far up as they work on
        each token by itself."""
        (logits,), end = outputs(self.gm), output_node(self.gm)
        whole: set[Node] = set()  # nodes that compute all rows
        while (found := self._small(logits, end, whole)) is None:
            pass
        selected: dict[Node, Node] = {}
        for node, val in found.items():
            for x in dict.fromkeys(tensor_operands(node)):
                if x not in found and (dim := _token_dim(x)) is not None:
                    if x not in selected:
                        selected[x] = insert_call(node, aten.index_select.default, (x, dim, self.inputs[LAST]))
                        inherit(selected[x], x, TYPES)
                    node.replace_input_with(x, selected[x])
            if node.target in _SIZED:
                node.update_arg(_SIZED[node.target], list(val.shape))
            node.meta["val"] = val
        if logits not in found:
            dim = _token_dim(logits)
            assert dim is not None
            end.args = ((insert_call(end, aten.index_select.default, (logits, dim, self.inputs[LAST])),),)

    def _small(self, logits: Node, end: Node, whole: set[Node]) -> dict[Node, Any] | None:
        """The nodes that can compute the rows ``last`` alone, with the results; None if one cannot, which is then added
        to ``whole``."""
        late: dict[Node, None] = {}
        for node in reversed(list(self.gm.graph.nodes)):
            leads = node is logits or (node.users and all(u in late for u in node.users))
            leads = leads and _token_dim(node) is not None
            alone = node.op == "call_function" and node.target not in _STOPS and not _asks_others(node)
            if leads and alone and node not in whole and all(map(self._one_each, (node, *tensor_operands(node)))):
                late[node] = None
        small: dict[Node, Any] = {}
        for node in reversed(list(late)):
            expected = self._of_last(node)
            args = list(node.args)
            if node.target in _SIZED:
                args[_SIZED[node.target]] = list(expected.shape)
            args, kwargs = map_arg((args, node.kwargs), lambda x: small[x] if x in small else self._of_last(x))
            try:
                with torch.no_grad(), self.mode:
                    made = node.target(*args, **kwargs)  # type: ignore[operator]
            except (RuntimeError, ValueError, IndexError):
                made = None
            if not isinstance(made, torch.Tensor) or made.shape != expected.shape:
                whole.add(node)
                return None
            small[node] = made
        return small

    def _one_each(self, x: Node) -> bool:
        """Whether it has one row per token, or none that is of a token."""
        dim = _token_dim(x)
        return dim is None or x.meta["val"].shape[dim] == self.part.length

    def _of_last(self, x: Node) -> Any:
        """A value like that of a node, with the rows ``last`` alone."""
        val, dim = x.meta["val"], _token_dim(x)
        if dim is None:
            return val
        with self.mode:
            return val.new_empty([self.part.start if d == dim else n for d, n in enumerate(val.shape)])


def _asks_others(node: Node) -> bool:
    """Whether other ranks have to do with the tokens: those of their experts, and those with other requests, whose rows
    ``last`` are others."""
    if is_conversion(node):
        axis, src, dst = conversion_of(node)
        return bool({*axis.split(",")} & {*DATA}) and conversion(src, dst) not in ("none", "slice")
    return node.target in ASKS and arguments(node)["expert"] is not None


def _token_dim(x: Node) -> int | None:
    """The dim of a value that the tokens lie in; None if none does."""
    where = placement(x, AXIS)
    return where.dim if isinstance(where, Shard) and isinstance(x.meta["val"], torch.Tensor) else None


def _refusal(node: Node, why: str) -> str:
    return (
        f"serve: {describe(node)} cannot run tokens of several requests together: {why}; generate with the model itself"
    )
